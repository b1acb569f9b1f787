// Shares work among threads, for a sanitizer to watch. See native_vectors_test.
#include <thread>
#include <vector>

#include "parallel.h"

namespace {

std::vector<std::thread> threads;

XLA_FFI_Error* count(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = 4;
  return nullptr;
}

XLA_FFI_Error* schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  threads.emplace_back(args->task, args->data);
  return nullptr;
}

}  // namespace

int main() {
  XLA_FFI_Api api = {};
  api.XLA_FFI_ThreadPool_NumThreads = count;
  api.XLA_FFI_ThreadPool_Schedule = schedule;
  XLA_FFI_CallFrame frame = {};
  frame.api = &api;
  const native::Pool pool(frame);
  for (std::size_t size = 0; size < 300; ++size) {
    std::vector<std::size_t> squares(size);
    native::parallel_for(pool, size, [&](std::size_t i) {
      squares[i] = i * i;
      std::this_thread::yield();  // so that others get their share
    });
    for (std::size_t i = 0; i < size; ++i) {
      if (squares[i] != i * i) return 1;
    }
    squares.clear();  // some threads may not have begun
    for (auto& thread : threads) thread.join();
    threads.clear();
  }
}
