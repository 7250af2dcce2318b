// What a kernel in Metal needs to run on a CPU: its words, its types, and threads that take turns.
//
// One threadgroup after another. Its threads are fibers of one thread of the system: each runs until it must wait for
// the others of its simdgroup (simd_sum) or of its threadgroup (a barrier). The order in which they run is a choice, so
// that what a missing barrier lets through shows in the numbers. Every index is checked.
//
// Each kernel compiles this anew: containers of the standard library would take four times as long as all else.

#pragma once

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

using uint = uint32_t;

struct uint3 {
  uint x, y, z;
};

// -- numbers of 16 bits -----------------------------------------------------------------------------------------------

inline uint32_t bits_of(float number) {
  uint32_t bits;
  memcpy(&bits, &number, 4);
  return bits;
}

inline float number_of(uint32_t bits) {
  float number;
  memcpy(&number, &bits, 4);
  return number;
}

struct bfloat16_t {
  uint16_t bits;
  explicit operator float() const { return number_of(uint32_t(bits) << 16); }
  bfloat16_t() = default;
  explicit bfloat16_t(float number) {
    const uint32_t wide = bits_of(number);
    bits = number != number ? 0x7FC0 : uint16_t((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16);
  }
};

struct float16_t {
  _Float16 number;
  explicit operator float() const { return float(number); }
  float16_t() = default;
  explicit float16_t(float wide) : number(_Float16(wide)) {}
};

namespace emulated {

// -- threads ----------------------------------------------------------------------------------------------------------

constexpr int LANES = 32;
constexpr int MOST_THREADS = 1024;
constexpr size_t STACK = 96 * 1024;
constexpr int64_t MOST_SHARED = 32 * 1024;
constexpr int MOST_NAMES = 16;

enum class State { READY, IN_SIMD, IN_GROUP, ENDED };

struct Thread {
  ucontext_t start;
  jmp_buf place;
  void* stack = nullptr;
  State state = State::READY;
  bool has_begun = false;
  float given = 0;
};

// A name of the threadgroup's memory.
struct Shared {
  const char* name;
  char* bytes;
};

struct Group {
  Thread threads[MOST_THREADS];
  int count = 0;
  Shared shared[MOST_NAMES];
  int names = 0;
  int64_t shared_bytes = 0;
  alignas(16) char memory[MOST_SHARED];
  uint3 position{}, groups{};
  int running = 0;
  jmp_buf scheduler;
  char error[256] = "";
  void (*body)(const void*) = nullptr;
  const void* given = nullptr;
};

inline Group group;

inline Thread& self() { return group.threads[group.running]; }

[[noreturn]] inline void leave() { _longjmp(group.scheduler, 1); }

template <typename... Words>
[[noreturn]] void fail(const char* format, Words... words) {
  snprintf(group.error, sizeof(group.error), format, words...);
  leave();
}

inline void wait(State state) {
  self().state = state;
  if (_setjmp(self().place) == 0) leave();
}

// A thread that has ended begins anew in the next threadgroup: to make one asks the system.
inline void begin() {
  while (true) {
    group.body(group.given);
    wait(State::ENDED);
  }
}

inline void resume(int index) {
  group.running = index;
  if (_setjmp(group.scheduler) != 0) return;
  Thread& thread = group.threads[index];
  if (thread.has_begun) _longjmp(thread.place, 1);
  thread.has_begun = true;
  if (thread.stack == nullptr) thread.stack = malloc(STACK);
  getcontext(&thread.start);
  thread.start.uc_stack.ss_sp = thread.stack;
  thread.start.uc_stack.ss_size = STACK;
  thread.start.uc_link = nullptr;
  makecontext(&thread.start, begin, 0);
  setcontext(&thread.start);
}

// Lets those go on for whom all others have come. False: none can.
inline bool release() {
  bool any = false, all_wait = true, all_ended = true;
  for (int first = 0; first < group.count; first += LANES) {
    const int end = first + LANES < group.count ? first + LANES : group.count;
    bool together = true;
    for (int lane = first; lane < end; lane++) {
      const State state = group.threads[lane].state;
      together &= state == State::IN_SIMD;
      all_wait &= state == State::IN_GROUP;
      all_ended &= state == State::ENDED;
    }
    if (!together) continue;
    float sum = 0;
    for (int lane = first; lane < end; lane++) sum += group.threads[lane].given;
    for (int lane = first; lane < end; lane++) {
      group.threads[lane].given = sum;
      group.threads[lane].state = State::READY;
    }
    any = true;
  }
  if (all_ended) return false;
  if (all_wait) {
    for (int lane = 0; lane < group.count; lane++) group.threads[lane].state = State::READY;
    any = true;
  }
  if (!any) snprintf(group.error, sizeof(group.error), "threads wait for others that will not come");
  return any;
}

// In a random order, that of a seed (xorshift).
inline void shuffle(int* order, int count, uint& random) {
  for (int index = count - 1; index > 0; index--) {
    random ^= random << 13;
    random ^= random >> 17;
    random ^= random << 5;
    const int other = int(random % uint(index + 1)), moved = order[index];
    order[index] = order[other];
    order[other] = moved;
  }
}

// What went wrong, or null.
inline const char* run(uint3 grid, uint3 threads, uint seed, void (*body)(const void*), const void* given) {
  if (threads.y != 1 || threads.z != 1 || grid.x % threads.x != 0) return "threadgroups lie along x, whole ones";
  if (threads.x > MOST_THREADS) return "a threadgroup has 1024 threads";
  if (group.error[0] != 0)  // those that were left in the middle
    for (Thread& thread : group.threads) thread.has_begun = false;
  group.error[0] = 0;
  group.body = body;
  group.given = given;
  group.count = int(threads.x);
  int order[MOST_THREADS];
  for (int index = 0; index < group.count; index++) order[index] = index;
  uint random = seed;
  group.groups = {grid.x / threads.x, grid.y, grid.z};
  for (uint z = 0; z < group.groups.z; z++)
    for (uint y = 0; y < group.groups.y; y++)
      for (uint x = 0; x < group.groups.x; x++) {
        group.position = {x, y, z};
        group.names = 0;
        group.shared_bytes = 0;
        for (int index = 0; index < group.count; index++) group.threads[index].state = State::READY;
        do {
          if (seed != 0) shuffle(order, group.count, random);
          for (int index = 0; index < group.count; index++)
            if (group.threads[order[index]].state == State::READY) {
              resume(order[index]);
              if (group.error[0] != 0) return group.error;
            }
        } while (release());
        if (group.error[0] != 0) return group.error;
      }
  return nullptr;
}

// -- memory -----------------------------------------------------------------------------------------------------------

// Numbers [count], each looked up by an index that must be one.
template <typename T>
struct Checked {
  T* at;
  int64_t count;
  const char* name;
  T& operator[](int64_t index) const {
    if (index < 0 || index >= count)
      fail("%s[%lld] of %lld", name, (long long)index, (long long)count);
    return at[index];
  }
};

// The threadgroup's own, NaN at first.
template <typename T>
Checked<T> shared(const char* name, int64_t count) {
  for (int index = 0; index < group.names; index++)
    if (strcmp(group.shared[index].name, name) == 0) return {(T*)group.shared[index].bytes, count, name};
  if (group.names == MOST_NAMES) fail("a threadgroup's memory has more than %d names", MOST_NAMES);
  char* const bytes = group.memory + group.shared_bytes;
  group.shared_bytes += (count * int64_t(sizeof(T)) + 15) / 16 * 16;
  if (group.shared_bytes > MOST_SHARED) fail("a threadgroup has 32 KiB of memory");
  for (int64_t index = 0; index < count; index++) ((T*)bytes)[index] = T(NAN);
  group.shared[group.names++] = {name, bytes};
  return {(T*)bytes, count, name};
}

// -- what the signature asks for ----------------------------------------------------------------------------------------

inline uint simdgroup_index_in_threadgroup() { return group.running / LANES; }
inline uint thread_index_in_simdgroup() { return group.running % LANES; }
inline uint3 threadgroup_position_in_grid() { return group.position; }
inline uint3 threadgroups_per_grid() { return group.groups; }

}  // namespace emulated

// Of two numbers of one type, as in Metal.
namespace metal {

template <typename One, typename Other>
auto max(One, Other) = delete;
template <typename One, typename Other>
auto min(One, Other) = delete;
inline int max(int one, int other) { return one < other ? other : one; }
inline float max(float one, float other) { return fmaxf(one, other); }
inline int min(int one, int other) { return other < one ? other : one; }
inline float exp(float number) { return expf(number); }
inline float tanh(float number) { return tanhf(number); }

inline float simd_sum(float number) {
  emulated::self().given = number;
  emulated::wait(emulated::State::IN_SIMD);
  return emulated::self().given;
}

enum class mem_flags { mem_threadgroup };

inline void threadgroup_barrier(mem_flags) { emulated::wait(emulated::State::IN_GROUP); }

}  // namespace metal

// Words of Metal: none of them may be a name.
#define device
#define constant
#define thread
#define kernel
#define vertex
#define fragment
#define half
