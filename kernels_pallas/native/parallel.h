// Work that the threads of XLA's pool share.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "call.h"

namespace native {

// Calls work(i) for each i below `count`, on threads of `pool` and on this one.
//
// Each thread begins with a part of its own, as memory is read faster in its
// order, and then helps the others. So does this one: until nothing is left,
// when it waits only for what others have begun. So it never waits for a task
// that has not started, which may never start where all threads of the pool are
// such callers.
inline void parallel_for(const Pool& pool, std::size_t count,
                         const std::function<void(std::size_t)>& work) {
  struct alignas(64) Next {  // a line of the cache
    std::atomic<std::size_t> index;
  };
  struct State {
    std::vector<Next> next;  // of each part
    std::atomic<std::size_t> done{0};
  };
  const std::size_t num_parts = std::min(pool.num_threads(), count);
  const auto begin = [=](std::size_t part) { return part * count / num_parts; };
  auto state = std::make_shared<State>();
  state->next = std::vector<Next>(num_parts);
  for (std::size_t part = 0; part < num_parts; ++part) {
    state->next[part].index = begin(part);
  }
  // `work` is alive as long as an index is left, and then no longer touched.
  auto run = [=, &work](std::size_t own) {
    for (std::size_t i = 0; i < num_parts; ++i) {
      const std::size_t part = (own + i) % num_parts;
      auto& next = state->next[part].index;
      for (std::size_t j; (j = next.fetch_add(1)) < begin(part + 1);) {
        work(j);
        state->done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  for (std::size_t own = 1; own < num_parts; ++own) {
    pool.schedule([=] { run(own); });
  }
  run(0);
  while (state->done.load(std::memory_order_acquire) < count) {
    std::this_thread::yield();
  }
}

// Operations below which other threads take longer to start than to help.
constexpr std::size_t kFewOperations = 1 << 16;

// Does the same, on this thread alone where all of it is little work.
inline void parallel_if(const Pool& pool, std::size_t num_operations,
                        std::size_t count,
                        const std::function<void(std::size_t)>& work) {
  if (num_operations >= kFewOperations) return parallel_for(pool, count, work);
  for (std::size_t i = 0; i < count; ++i) work(i);
}

}  // namespace native
