// What the native tests share: a check that ends the program, and an executor with real threads.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "cpu/types.h"

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

namespace dcgnn::test {

// One thread for each range, so that the thread sanitizer sees the real sharing.
class ThreadExecutor final : public cpu::Executor {
 public:
  explicit ThreadExecutor(int64_t num_threads) : num_threads_(num_threads) {}
  void run(int64_t num_tasks, cpu::RangeBody body) const override {
    std::vector<std::thread> threads;
    for (int64_t i = 0; i < num_threads_; ++i) {
      const int64_t begin = num_tasks * i / num_threads_, end = num_tasks * (i + 1) / num_threads_;
      if (begin < end) threads.emplace_back([=] { body(begin, end); });
    }
    for (auto& thread : threads) thread.join();
  }

 private:
  int64_t num_threads_;
};

}  // namespace dcgnn::test
