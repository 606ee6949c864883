// How the segments of a CSR array (egos, or nodes of the transpose) are cut into tasks.
//
// Tasks hold about kChunkSlots slots of whole segments, whatever the degrees. A segment longer than
// kHubSlots is a hub: all threads work on it together, in blocks of kBlockRows. The cut depends on
// the graph alone, never on the number of threads, and sums run in block order: the same bits for
// any number.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>
#include <type_traits>

#include "types.h"

namespace dcgnn::cpu::DCGNN_ISA {

constexpr int64_t kBlockRows = 2048;
constexpr int64_t kPaddedRows = 8;  // columns of rows are written in groups of up to so many
constexpr int64_t kChunkSlots = 2048;
constexpr int64_t kHubSlots = 4 * kBlockRows;
static_assert(kBlockRows % kPaddedRows == 0);
static_assert(kHubSlots >= kChunkSlots, "a hub must contain a chunk boundary to be found");

// Aligned, growing, uninitialised memory; kept by a thread over all of its segments.
template <class T>
class Buffer {
 public:
  static_assert(std::is_trivially_copyable_v<T>);
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { give_back(); }
  T* reserve(int64_t count) {
    if (count > capacity_) {
      give_back();
      const int64_t bytes = (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
      if (bytes >= kLargeBuffer) {
        data_ = static_cast<T*>(working_memory().take(bytes, &handle_));
      } else {
        data_ = static_cast<T*>(std::aligned_alloc(64, static_cast<size_t>(bytes)));
        if (data_ == nullptr) throw std::bad_alloc();
      }
      capacity_ = count;
    }
    return data_;
  }

 private:
  void give_back() {
    if (handle_ != nullptr) {
      working_memory().give_back(handle_);
    } else {
      std::free(data_);
    }
    data_ = nullptr;
    handle_ = nullptr;
    capacity_ = 0;
  }

  T* data_ = nullptr;
  void* handle_ = nullptr;  // of large memory
  int64_t capacity_ = 0;
};

// An array of int32_t or int64_t, or without data 0, 1, 2, ... Which of them is known at run time
// only: the kernels exist once, not once for each, but for the innermost loops.
struct IndexArray {
  const void* data = nullptr;
  bool wide = false;
  const int32_t* narrow() const { return wide ? nullptr : static_cast<const int32_t*>(data); }
  int64_t operator[](int64_t k) const {
    if (data == nullptr) return k;
    return wide ? static_cast<const int64_t*>(data)[k] : static_cast<const int32_t*>(data)[k];
  }
  // The array from entry k on; it has data.
  IndexArray from(int64_t k) const {
    const char* bytes = static_cast<const char*>(data);
    return {bytes + k * static_cast<int64_t>(wide ? sizeof(int64_t) : sizeof(int32_t)), wide};
  }
};

class SlotSplit {
 public:
  SlotSplit(IndexArray ptr, int64_t num_segments) : ptr_(ptr), num_segments_(num_segments) {
    first_slot_ = num_segments == 0 ? 0 : ptr[0];
    num_slots_ = num_segments == 0 ? 0 : ptr[num_segments] - first_slot_;
  }
  int64_t num_tasks() const {
    const int64_t by_slots = (num_slots_ + kChunkSlots - 1) / kChunkSlots;
    return by_slots > 0 ? by_slots : (num_segments_ > 0 ? 1 : 0);
  }
  bool is_hub(int64_t segment) const { return ptr_[segment + 1] - ptr_[segment] > kHubSlots; }

  // The first segment of a task: the first that begins at or after the task's first slot.
  int64_t task_begin(int64_t task) const {
    if (task == 0) return 0;
    if (task >= num_tasks()) return num_segments_;
    int64_t low = 0, high = num_segments_;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (ptr_[middle] - first_slot_ < task * kChunkSlots) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // visit(segment) for the hubs. Each contains the first slot of some task or begins just there, so
  // that the segments around the tasks' begins are the only candidates.
  template <class Visit>
  void for_each_hub(const Visit& visit) const {
    int64_t last = -1;
    for (int64_t task = 0; task < num_tasks(); ++task) {
      const int64_t begin = task_begin(task);
      for (int64_t segment = begin - 1; segment <= begin; ++segment) {
        if (segment > last && segment >= 0 && segment < num_segments_ && is_hub(segment)) {
          last = segment;
          visit(segment);
        }
      }
    }
  }

 private:
  IndexArray ptr_;
  int64_t num_segments_;
  int64_t first_slot_, num_slots_;
};

}  // namespace dcgnn::cpu::DCGNN_ISA
