// What a kernel in Metal needs to run on a CPU: its words, its types, and threads that take turns.
//
// One threadgroup after another. Its threads are fibers of one thread of the system: each runs until it must wait for
// the others of its simdgroup (simd_sum) or of its threadgroup (a barrier). The order in which they run is a choice, so
// that what a missing barrier lets through shows in the numbers. Every index is checked.

#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

using uint = uint32_t;

struct uint3 {
  uint x, y, z;
};

// -- numbers of 16 bits -----------------------------------------------------------------------------------------------

inline uint32_t bits_of(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, 4);
  return bits;
}

inline float number_of(uint32_t bits) {
  float number;
  std::memcpy(&number, &bits, 4);
  return number;
}

struct bfloat16_t {
  uint16_t bits;
  explicit operator float() const { return number_of(uint32_t(bits) << 16); }
  bfloat16_t() = default;
  explicit bfloat16_t(float number) {
    const uint32_t wide = bits_of(number);
    bits = std::isnan(number) ? 0x7FC0 : uint16_t((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16);
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
constexpr size_t STACK = 96 * 1024;
constexpr size_t MOST_SHARED = 32 * 1024;

enum class State { READY, IN_SIMD, IN_GROUP, ENDED };

struct Thread {
  ucontext_t start;
  jmp_buf place;
  std::vector<char> stack = std::vector<char>(STACK);
  State state = State::READY;
  bool has_begun = false;
  float given = 0;
};

struct Group {
  std::vector<Thread> threads;
  std::map<std::string, std::vector<char>> shared;
  size_t shared_bytes = 0;
  uint3 position{}, groups{};
  int running = 0;
  jmp_buf scheduler;
  std::string error;
  const std::function<void()>* body = nullptr;
};

inline Group group;

inline Thread& self() { return group.threads[group.running]; }

[[noreturn]] inline void leave() { _longjmp(group.scheduler, 1); }

[[noreturn]] inline void fail(const std::string& error) {
  group.error = error;
  leave();
}

inline void wait(State state) {
  self().state = state;
  if (_setjmp(self().place) == 0) leave();
}

inline void begin() {
  (*group.body)();
  self().state = State::ENDED;
  leave();
}

inline void resume(int index) {
  group.running = index;
  if (_setjmp(group.scheduler) != 0) return;
  Thread& thread = group.threads[index];
  if (thread.has_begun) _longjmp(thread.place, 1);
  thread.has_begun = true;
  getcontext(&thread.start);
  thread.start.uc_stack.ss_sp = thread.stack.data();
  thread.start.uc_stack.ss_size = thread.stack.size();
  thread.start.uc_link = nullptr;
  makecontext(&thread.start, begin, 0);
  setcontext(&thread.start);
}

// Lets those go on for whom all others have come. False: none can.
inline bool release() {
  bool any = false, all_wait = true, all_ended = true;
  const int count = int(group.threads.size());
  for (const Thread& thread : group.threads) {
    all_wait &= thread.state == State::IN_GROUP;
    all_ended &= thread.state == State::ENDED;
  }
  if (all_ended) return false;
  for (int first = 0; first < count; first += LANES) {
    const int end = std::min(first + LANES, count);
    bool together = true;
    for (int lane = first; lane < end; lane++) together &= group.threads[lane].state == State::IN_SIMD;
    if (!together) continue;
    float sum = 0;
    for (int lane = first; lane < end; lane++) sum += group.threads[lane].given;
    for (int lane = first; lane < end; lane++) {
      group.threads[lane].given = sum;
      group.threads[lane].state = State::READY;
    }
    any = true;
  }
  if (all_wait) {
    for (Thread& thread : group.threads) thread.state = State::READY;
    any = true;
  }
  if (!any) group.error = "threads wait for others that will not come";
  return any;
}

inline std::string run(uint3 grid, uint3 threads, uint seed, const std::function<void()>& body) {
  std::mt19937 random(seed);
  group = Group();
  group.body = &body;
  group.threads.resize(threads.x);
  if (threads.y != 1 || threads.z != 1 || grid.x % threads.x != 0) return "threadgroups lie along x, whole ones";
  std::vector<int> order(threads.x);
  for (size_t index = 0; index < order.size(); index++) order[index] = int(index);
  group.groups = {grid.x / threads.x, grid.y, grid.z};
  for (uint z = 0; z < group.groups.z; z++)
    for (uint y = 0; y < group.groups.y; y++)
      for (uint x = 0; x < group.groups.x; x++) {
        group.position = {x, y, z};
        group.shared.clear();
        group.shared_bytes = 0;
        for (Thread& thread : group.threads) {
          thread.state = State::READY;
          thread.has_begun = false;
        }
        do {
          if (seed != 0) std::shuffle(order.begin(), order.end(), random);
          for (const int index : order)
            if (group.threads[index].state == State::READY) {
              resume(index);
              if (!group.error.empty()) return group.error;
            }
        } while (release());
        if (!group.error.empty()) return group.error;
      }
  return "";
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
      fail(std::string(name) + "[" + std::to_string(index) + "] of " + std::to_string(count));
    return at[index];
  }
};

// The threadgroup's own, NaN at first.
template <typename T>
Checked<T> shared(const char* name, int64_t count) {
  std::vector<char>& bytes = group.shared[name];
  if (bytes.empty()) {
    bytes.resize(count * sizeof(T));
    for (int64_t index = 0; index < count; index++)
      reinterpret_cast<T*>(bytes.data())[index] = std::numeric_limits<T>::quiet_NaN();
    group.shared_bytes += bytes.size();
    if (group.shared_bytes > MOST_SHARED) fail("a threadgroup has 32 KiB of memory");
  }
  return {reinterpret_cast<T*>(bytes.data()), count, name};
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
inline float max(float one, float other) { return std::fmax(one, other); }
inline int min(int one, int other) { return other < one ? other : one; }
inline float exp(float number) { return std::exp(number); }
inline float tanh(float number) { return std::tanh(number); }

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
