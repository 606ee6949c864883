// Runs a body over the segments of a CSR array: small ones in tasks, hubs block by block with all
// threads.
#pragma once

#include "rows.h"
#include "split.h"

namespace dcgnn::cpu::DCGNN_ISA {

// make() gives the state that a thread keeps over its segments; body(state, segment) works on one
// that is not a hub; hub(segment) on a hub, with the whole executor to itself; finish(state) comes
// after a thread's last segment.
template <class Make, class Body, class Hub, class Finish>
void for_each_segment(IndexArray ptr, int64_t num_segments, const Executor& executor,
                      const Make& make, const Body& body, const Hub& hub, const Finish& finish) {
  const SlotSplit split(ptr, num_segments);
  executor.run(split.num_tasks(), [&](int64_t begin, int64_t end) {
    auto state = make();
    const int64_t last = split.task_begin(end);
    for (int64_t segment = split.task_begin(begin); segment < last; ++segment) {
      if (!split.is_hub(segment)) body(state, segment);
    }
    finish(state);
    stream_fence();
  });
  split.for_each_hub(hub);
  stream_fence();
}

template <class Make, class Body, class Hub>
void for_each_segment(IndexArray ptr, int64_t num_segments, const Executor& executor,
                      const Make& make, const Body& body, const Hub& hub) {
  for_each_segment(ptr, num_segments, executor, make, body, hub, [](auto&) {});
}

// sum_block(segment, begin, end, sums) sums `width` values over some entries of a segment;
// write(segment, sums) gets the sums over all of them. A hub's entries are summed in blocks, and
// the blocks in order.
template <class A, class SumBlock, class Write>
void sum_segment_blocks(IndexArray ptr, int64_t num_segments, int64_t width,
                        const Executor& executor, const SumBlock& sum_block, const Write& write) {
  struct Memory {
    Buffer<A> sums;
  };
  for_each_segment(
      ptr, num_segments, executor, [] { return Memory{}; },
      [&](Memory& memory, int64_t segment) {
        A* sums = memory.sums.reserve(width);
        sum_block(segment, ptr[segment], ptr[segment + 1], sums);
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

// The same for one row of F channels a segment, out[segment * F + f].
template <class T, class SumBlock>
void sum_segments(IndexArray ptr, int64_t num_segments, int64_t channels, T* out,
                  const Executor& executor, const SumBlock& sum_block) {
  sum_segment_blocks<Acc<T>>(ptr, num_segments, channels, executor, sum_block,
                             [&](int64_t segment, const Acc<T>* sums) {
                               write_row(out + segment * channels, sums, channels);
                             });
}

// The entries of the transpose: entry k is a node at CSR position slot[k] of the ego ego[k].
// fetch(ego, slot) asks for what an entry will need, `distance` ahead. Index: IndexArray or
// const int32_t*.
template <class Index, class Fetch>
struct TransposeEntries {
  Index ego;
  Index position;
  int64_t count;
  Fetch fetch;
  int64_t distance;
  DCGNN_INLINE int64_t problem(int64_t k) const { return ego[k]; }
  DCGNN_INLINE int64_t slot(int64_t k) const { return position[k]; }
  DCGNN_INLINE void prefetch(int64_t k) const {
    const int64_t ahead = k + distance;
    if (ahead < count) fetch(ego[ahead], position[ahead]);
  }
};

// visit(T{}) with the type that a call's arrays have.
template <class Visit>
void with_storage(DType dtype, const Visit& visit) {
  if (dtype == DType::kFloat32) visit(float{});
  if (dtype == DType::kFloat64) visit(double{});
  if (dtype == DType::kBFloat16) visit(BFloat16{});
}

// The arrays of a graph, to be read by position.
struct GraphView {
  explicit GraphView(const Graph& graph)
      : num_egos(graph.num_egos),
        num_nodes(graph.num_nodes),
        num_slots(graph.num_slots),
        num_entries(graph.num_slots),
        rowptr{graph.rowptr, graph.wide_index},
        member{graph.member, graph.wide_index},
        colptr{graph.colptr, graph.wide_index},
        ego{graph.ego, graph.wide_index},
        slot{graph.slot, graph.wide_index} {}
  int64_t num_egos, num_nodes, num_slots;
  int64_t num_entries;  // of the transpose
  IndexArray rowptr, member, colptr, ego, slot;
};

// visit(entries) with the transpose's entries, with fetch(ego, slot) to ask for what an entry will
// need, some `bytes`.
template <class Fetch, class Visit>
void with_transpose_entries(const GraphView& graph, int64_t bytes, const Fetch& fetch,
                            const Visit& visit) {
  const int64_t distance = prefetch_distance(bytes);
  const int32_t* ego = graph.ego.narrow();
  const int32_t* slot = graph.slot.narrow();
  if (ego != nullptr && slot != nullptr) {
    visit(TransposeEntries<const int32_t*, Fetch>{ego, slot, graph.num_entries, fetch, distance});
  } else {
    visit(TransposeEntries<IndexArray, Fetch>{graph.ego, graph.slot, graph.num_entries, fetch,
                                              distance});
  }
}

// The transpose of a graph, cut into the entries of consecutive ranges of egos. The egos of a node
// ascend, so that every entry is looked at once.
template <class Index>
class TransposeParts {
 public:
  TransposeParts(const GraphView& graph, const Executor& executor)
      : graph_(graph), executor_(executor) {
    Index* next = next_.reserve(graph.num_nodes);
    for_each_node([&](int64_t node) { next[node] = static_cast<Index>(graph_.colptr[node]); });
  }

  // The graph with the entries of the egos up to `last` that no part has had yet; it lives until
  // the next call.
  GraphView cut(int64_t last) {
    GraphView part = graph_;
    Index* next = next_.reserve(graph_.num_nodes);
    Index* colptr = colptr_.reserve(graph_.num_nodes + 1);
    const Index* all_egos = static_cast<const Index*>(graph_.ego.data);
    const Index* all_slots = static_cast<const Index*>(graph_.slot.data);
    const IndexArray ends = graph_.colptr;
    colptr[0] = 0;
    for_each_node([&](int64_t node) {
      const int64_t begin = next[node], end = ends[node + 1];
      int64_t k = begin;
      while (k < end && all_egos[k] < last) ++k;
      colptr[node + 1] = static_cast<Index>(k - begin);
    });
    for (int64_t node = 0; node < graph_.num_nodes; ++node) colptr[node + 1] += colptr[node];
    part.num_entries = colptr[graph_.num_nodes];
    Index* ego = ego_.reserve(part.num_entries);
    Index* slot = slot_.reserve(part.num_entries);
    for_each_node([&](int64_t node) {
      int64_t from = next[node];
      for (int64_t k = colptr[node]; k < colptr[node + 1]; ++k, ++from) {
        ego[k] = all_egos[from];
        slot[k] = all_slots[from];
      }
      next[node] = static_cast<Index>(from);
    });
    part.colptr.data = colptr;
    part.ego.data = ego;
    part.slot.data = slot;
    return part;
  }

 private:
  template <class Body>
  void for_each_node(const Body& body) const {
    executor_.run((graph_.num_nodes + kBlockRows - 1) / kBlockRows,
                  [&](int64_t begin, int64_t end) {
                    const int64_t stop = end * kBlockRows;
                    const int64_t last = stop < graph_.num_nodes ? stop : graph_.num_nodes;
                    for (int64_t node = begin * kBlockRows; node < last; ++node) body(node);
                  });
  }

  const GraphView graph_;
  const Executor& executor_;
  Buffer<Index> next_, colptr_, ego_, slot_;
};

}  // namespace dcgnn::cpu::DCGNN_ISA
