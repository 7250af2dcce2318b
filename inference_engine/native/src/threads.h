// Threads of our own: they compute one parallel region after another and sleep when there is none.
//
// A step is a few hundred regions of some microseconds, so a thread that has finished one spins for a moment before it
// sleeps. The caller is thread 0. A region's work is taken piece by piece, and the caller waits only for threads that have
// begun one: a thread that the system does not let run, because something else is on its core, delays nothing. Every
// output is computed by one thread in one order of adding, so results do not depend on which thread that is.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

// The C library gives a thread the thread_local memory of a library when it first touches it, and ends the process if
// there is none: so threads touch ours, and that of exceptions, as they begin.
inline void begin_thread() {
  static thread_local volatile int exceptions = 0;
  exceptions = exceptions + std::uncaught_exceptions();
}

class Threads {
 public:
  // As many of `count` as the system gives, the caller's among them.
  explicit Threads(int count) {
    begin_thread();
    threads_.reserve(count < 1 ? 0 : (size_t)count);
    try {
      for (; count_ < count; count_++) threads_.emplace_back([this, index = count_] { work(index); });
    } catch (const std::system_error&) {
    }
  }
  ~Threads() {
    {
      std::lock_guard<std::mutex> held(mutex_);
      ends_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int count() const { return count_; }

  // Does no thread sleep? Then a region of some microseconds is worth dividing; waking one takes longer.
  bool are_awake() const { return !sleeping_.load(std::memory_order_relaxed); }

  // body(index, count) on the caller and on each thread that is free; returns when all that have begun it have finished.
  // Bodies take pieces of work from a counter until none is left. Throws what one of them has thrown.
  template <class Body>
  void run(const Body& body) {
    if (count_ == 1) {
      body(0, 1);
      return;
    }
    call_ = [](const void* body_, int index, int count) { (*(const Body*)body_)(index, count); };
    body_ = &body;
    state_.store(((state_.load(std::memory_order_relaxed) / ROUND + 1) * ROUND) | OPEN);
    if (sleeping_.load()) {
      std::lock_guard<std::mutex> held(mutex_);
      wake_.notify_all();
    }
    guarded(0);
    state_.fetch_and(~OPEN);  // nothing is left to begin with
    for (int spins = 0; state_.load(std::memory_order_acquire) & BUSY;)
      if (++spins > SPINS) std::this_thread::yield();
      else pause();
    if (thrown_) std::rethrow_exception(std::exchange(thrown_, nullptr));
  }

  // body(first, end) over [0, total) in pieces of whole units. A free thread takes the next piece, a part of what is left:
  // the last ones are small, so threads finish together, and one on a core that is busy elsewhere delays nothing by half of
  // the work. body(first, end, next): `next` says where the piece begins that is free now, or that none is.
  template <class Body>
  void split(int64_t total, int64_t unit, const Body& body) {
    int64_t units = (total + unit - 1) / unit;
    if (count_ == 1 || units <= 1) {
      if (total) piece(body, 0, total, [=] { return total; });
      return;
    }
    int64_t parts = (int64_t)count_ * PARTS;
    std::atomic<int64_t> next{0};
    run([&](int, int) {
      for (int64_t first = next.load(std::memory_order_relaxed); first < units;) {
        int64_t end = first + (units - first + parts - 1) / parts;
        if (!next.compare_exchange_weak(first, end, std::memory_order_relaxed)) continue;
        piece(body, first * unit, end * unit < total ? end * unit : total,
              [&] { return next.load(std::memory_order_relaxed) * unit; });
        first = next.load(std::memory_order_relaxed);
      }
    });
  }

 private:
  static constexpr uint64_t OPEN = 1 << 16, BUSY = OPEN - 1, ROUND = 2 * OPEN;
  static constexpr int SPINS = 4000;
  static constexpr int PARTS = 2;  // of what is left, for each thread

  template <class Body, class Next>
  static void piece(const Body& body, int64_t first, int64_t end, const Next& next) {
    if constexpr (std::is_invocable_v<const Body&, int64_t, int64_t, const Next&>) body(first, end, next);
    else body(first, end);
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  // An exception waits until all have finished: they use what the caller has on its stack.
  void guarded(int index) {
    try {
      call_(body_, index, count_);
    } catch (...) {
      std::lock_guard<std::mutex> held(mutex_);
      if (!thrown_) thrown_ = std::current_exception();
    }
  }

  bool is_new(uint64_t state, uint64_t last) const { return (state & OPEN) && state / ROUND != last; }

  // Begins the open region, unless it was closed or is the last one that this thread has seen.
  void join(int index, uint64_t& last) {
    uint64_t state = state_.load();
    while (is_new(state, last)) {
      if (!state_.compare_exchange_weak(state, state + 1)) continue;
      last = state / ROUND;
      guarded(index);
      state_.fetch_sub(1, std::memory_order_acq_rel);
      return;
    }
  }

  void work(int index) {
    begin_thread();
    uint64_t last = 0;
    while (!ends_) {
      for (int spins = 0; !is_new(state_.load(), last) && !ends_; spins++) {
        if (spins < SPINS) {
          pause();
          continue;
        }
        std::unique_lock<std::mutex> held(mutex_);
        sleeping_.fetch_add(1);
        wake_.wait(held, [&] { return ends_ || is_new(state_.load(), last); });
        sleeping_.fetch_sub(1);
      }
      join(index, last);
    }
  }

  int count_ = 1;
  std::vector<std::thread> threads_;
  std::atomic<uint64_t> state_{0};  // number of the region · is it open? · threads that are in it
  std::atomic<int> sleeping_{0};
  std::atomic<bool> ends_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  void (*call_)(const void*, int, int) = nullptr;
  const void* body_ = nullptr;
  std::exception_ptr thrown_;
};
