// Work that the threads of XLA's pool share.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <thread>

namespace native {

// Calls work(i) for each i below `count`, on threads of `pool` and on this one.
//
// This thread works, too, until nothing is left, and then waits only for what
// others have begun. So it never waits for a task that has not started, which
// may never start where all threads of the pool are such callers.
template <class Pool, class Work>
void parallel_for(Pool& pool, std::size_t count, const Work& work) {
  struct State {
    std::atomic<std::size_t> next{0};
    std::atomic<std::size_t> done{0};
  };
  auto state = std::make_shared<State>();
  // `work` is alive as long as an index is left, and then no longer touched.
  auto run = [state, count, &work] {
    for (std::size_t i; (i = state->next.fetch_add(1)) < count;) {
      work(i);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  const std::size_t threads = std::max<std::int64_t>(pool.num_threads(), 1);
  for (std::size_t i = 1; i < std::min(threads, count); ++i) {
    pool.Schedule([run] { run(); });
  }
  run();
  while (state->done.load(std::memory_order_acquire) < count) {
    std::this_thread::yield();
  }
}

}  // namespace native
