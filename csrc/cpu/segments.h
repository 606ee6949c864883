// Runs a body over the segments of a CSR array: small ones in tasks, hubs block by block with all
// threads.
#pragma once

#include "rows.h"
#include "split.h"

namespace dcgnn::cpu::DCGNN_ISA {

// make() gives the state that a thread keeps over its segments; body(state, segment) works on one
// that is not a hub; hub(segment) on a hub, with the whole executor to itself.
template <class Index, class Make, class Body, class Hub>
void for_each_segment(const Index* ptr, int64_t num_segments, const Executor& executor,
                      const Make& make, const Body& body, const Hub& hub) {
  const SlotSplit<Index> split(ptr, num_segments);
  executor.run(split.num_tasks(), [&](int64_t begin, int64_t end) {
    auto state = make();
    const int64_t last = split.task_begin(end);
    for (int64_t segment = split.task_begin(begin); segment < last; ++segment) {
      if (!split.is_hub(segment)) body(state, segment);
    }
  });
  split.for_each_hub(hub);
}

// sum_block(segment, begin, end, sums) sums `width` values over some entries of a segment;
// write(segment, sums) gets the sums over all of them. A hub's entries are summed in blocks, and
// the blocks in order.
template <class A, class Index, class SumBlock, class Write>
void sum_segment_blocks(const Index* ptr, int64_t num_segments, int64_t width,
                        const Executor& executor, const SumBlock& sum_block, const Write& write) {
  struct Memory {
    Buffer<A> sums;
  };
  for_each_segment(
      ptr, num_segments, executor, [] { return Memory{}; },
      [&](Memory& memory, int64_t segment) {
        A* sums = memory.sums.reserve(width);
        sum_block(segment, int64_t{ptr[segment]}, int64_t{ptr[segment + 1]}, sums);
        write(segment, sums);
      },
      [&](int64_t segment) {
        const int64_t begin = ptr[segment], end = ptr[segment + 1];
        const int64_t num_blocks = (end - begin + kBlockRows - 1) / kBlockRows;
        Buffer<A> buffer;
        A* sums = buffer.reserve(num_blocks * width);
        executor.run(num_blocks, [&](int64_t first, int64_t last) {
          for (int64_t block = first; block < last; ++block) {
            const int64_t from = begin + block * kBlockRows;
            const int64_t to = from + kBlockRows < end ? from + kBlockRows : end;
            sum_block(segment, from, to, sums + block * width);
          }
        });
        for (int64_t block = 1; block < num_blocks; ++block) {
          for (int64_t f = 0; f < width; ++f) sums[f] += sums[block * width + f];
        }
        write(segment, sums);
      });
}

template <class T>
DCGNN_INLINE void write_row(T* out, const Acc<T>* values, int64_t count) {
  for_each_slice<Acc<T>, 1>(count, [&](auto slice) { slice.store(out, 0, slice.load(values, 0)); });
}

// The same for one row of F channels a segment, out[segment * F + f].
template <class T, class Index, class SumBlock>
void sum_segments(const Index* ptr, int64_t num_segments, int64_t channels, T* out,
                  const Executor& executor, const SumBlock& sum_block) {
  sum_segment_blocks<Acc<T>>(ptr, num_segments, channels, executor, sum_block,
                             [&](int64_t segment, const Acc<T>* sums) {
                               write_row(out + segment * channels, sums, channels);
                             });
}

// The entries of the transpose: entry k is a node at CSR position slot[k] of the ego ego[k].
// fetch(ego, slot) asks for what an entry will need, kPrefetchRows entries ahead.
template <class Index, class Fetch>
struct TransposeEntries {
  const Index* ego;
  const Index* position;
  int64_t num_slots;
  Fetch fetch;
  DCGNN_INLINE int64_t problem(int64_t k) const { return ego[k]; }
  DCGNN_INLINE int64_t slot(int64_t k) const { return position[k]; }
  DCGNN_INLINE void prefetch(int64_t k) const {
    const int64_t ahead = k + kPrefetchRows;
    if (ahead < num_slots)
      fetch(static_cast<int64_t>(ego[ahead]), static_cast<int64_t>(position[ahead]));
  }
};

// visit(T{}, Index{}) with the types that a call's arrays have.
template <class Visit>
void with_storage(DType dtype, const Visit& visit) {
  if (dtype == DType::kFloat32) visit(float{});
  if (dtype == DType::kFloat64) visit(double{});
  if (dtype == DType::kBFloat16) visit(BFloat16{});
}
template <class Visit>
void with_types(DType dtype, const Graph& graph, const Visit& visit) {
  with_storage(dtype, [&](auto storage) {
    if (graph.wide_index) {
      visit(storage, int64_t{});
    } else {
      visit(storage, int32_t{});
    }
  });
}

template <class Index>
DCGNN_INLINE const Index* index_array(const void* array) {
  return static_cast<const Index*>(array);
}

}  // namespace dcgnn::cpu::DCGNN_ISA
