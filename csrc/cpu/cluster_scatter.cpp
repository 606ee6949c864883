// The broadcast, out_i = sum_{egos u of i} sum_j P^u_ij C^u_j, as a gather over the transpose; and
// its backward in one gather over the egos: grad_assign_uj = C_j . grad_u and grad_clusters_j =
// sum_u P_uj grad_u.
#include "segments.h"
#include "tables.h"

namespace dcgnn::cpu::DCGNN_ISA {
namespace {

// NumClusters 0: known at run time only.
template <int NumClusters, class T, class Entries>
void gather_clusters(const Entries& entries, int64_t begin, int64_t end, int64_t num_clusters,
                     int64_t channels, const T* assign, const T* clusters, Acc<T>* out) {
  using A = Acc<T>;
  const int64_t count = NumClusters == 0 ? num_clusters : NumClusters;
  for_each_slice<A, kVectorRegisters / 4>(channels, [&](auto slice) {
    constexpr int NV = decltype(slice)::kVectors;
    Vec<A> acc[NV] = {};
    for (int64_t k = begin; k < end; ++k) {
      if (slice.first == 0) entries.prefetch(k);
      const T* weight = assign + entries.slot(k) * count;
      const T* cluster = clusters + entries.problem(k) * count * channels;
      for (int64_t j = 0; j < count; ++j) {
        const A p = to_acc(weight[j]);
        for (int v = 0; v < NV; ++v) acc[v] += p * slice.load(cluster + j * channels, v);
      }
    }
    for (int v = 0; v < NV; ++v) slice.store(out, v, acc[v]);
  });
}

template <class T, class Index>
void run_forward(const ScatterForward& call, const Executor& executor) {
  using A = Acc<T>;
  const Graph& graph = *call.graph;
  const int64_t num_clusters = call.num_clusters, channels = call.channels;
  const T* assign = static_cast<const T*>(call.assign);
  const T* clusters = static_cast<const T*>(call.clusters);
  const auto fetch = [=](int64_t ego, int64_t slot) {
    prefetch_row(clusters + ego * num_clusters * channels, num_clusters * channels);
    __builtin_prefetch(assign + slot * num_clusters);
  };
  const TransposeEntries<Index, decltype(fetch)> entries{
      index_array<Index>(graph.ego), index_array<Index>(graph.slot), graph.num_slots, fetch};
  const auto gather = num_clusters == 2 ? gather_clusters<2, T, decltype(entries)>
                                        : gather_clusters<0, T, decltype(entries)>;
  sum_segments(index_array<Index>(graph.colptr), graph.num_nodes, channels,
               static_cast<T*>(call.out), executor,
               [&](int64_t, int64_t begin, int64_t end, A* sums) {
                 gather(entries, begin, end, num_clusters, channels, assign, clusters, sums);
               });
}

// One block of an ego's slots: grad_assign of the slots, and their part of grad_clusters.
template <class T, class Rows>
void backward_block(const ScatterBackward& call, const Rows& rows, int64_t count, const T* assign,
                    const T* clusters, T* grad_assign, Acc<T>* columns, Acc<T>* sums) {
  using A = Acc<T>;
  const int64_t num_clusters = call.num_clusters, stride = kBlockRows;
  reduce_rows_by_all<Dot, true>(rows, count, clusters, num_clusters, columns, stride);
  for (int64_t j = 0; j < num_clusters; ++j) {
    A* column = columns + j * stride;
    for (int64_t u = 0; u < count; ++u) {
      grad_assign[u * num_clusters + j] = from_acc<T>(column[u]);
      column[u] = to_acc(assign[u * num_clusters + j]);
    }
  }
  weighted_sums_of_all<false>(rows, count, columns, stride, num_clusters,
                              static_cast<const T*>(nullptr), sums);
}

template <class T, class Index>
void run_backward(const ScatterBackward& call, const Executor& executor) {
  using A = Acc<T>;
  const Graph& graph = *call.graph;
  const int64_t num_clusters = call.num_clusters, channels = call.channels;
  const int64_t width = num_clusters * channels;
  const Index* rowptr = index_array<Index>(graph.rowptr);
  const Index* member = index_array<Index>(graph.member);
  const GatheredRows<T, Index> rows{static_cast<const T*>(call.grad), channels, member,
                                    member + graph.num_slots};
  struct Memory {
    Buffer<A> columns, sums;
  };
  const auto block = [&](Memory& memory, int64_t ego, int64_t begin, int64_t count, A* sums) {
    backward_block<T>(call, rows.from(begin), count,
                      static_cast<const T*>(call.assign) + begin * num_clusters,
                      static_cast<const T*>(call.clusters) + ego * width,
                      static_cast<T*>(call.grad_assign) + begin * num_clusters,
                      memory.columns.reserve(num_clusters * kBlockRows), sums);
  };
  const auto all_blocks = [&](const Executor& blocks, Memory& memory, int64_t ego) {
    const int64_t begin = rowptr[ego], end = rowptr[ego + 1];
    const int64_t num_blocks = (end - begin + kBlockRows - 1) / kBlockRows;
    A* partials = memory.sums.reserve(num_blocks * width);
    blocks.run(num_blocks, [&](int64_t first, int64_t last) {
      Memory own;
      Memory& used = num_blocks == 1 ? memory : own;
      for (int64_t b = first; b < last; ++b) {
        const int64_t from = begin + b * kBlockRows;
        const int64_t count = end - from < kBlockRows ? end - from : kBlockRows;
        block(used, ego, from, count, partials + b * width);
      }
    });
    T* out = static_cast<T*>(call.grad_clusters) + ego * width;
    for (int64_t b = 1; b < num_blocks; ++b) {
      for (int64_t f = 0; f < width; ++f) partials[f] += partials[b * width + f];
    }
    for (int64_t f = 0; f < width; ++f) out[f] = from_acc<T>(num_blocks > 0 ? partials[f] : A(0));
  };
  const SerialExecutor serial;
  for_each_segment(
      rowptr, graph.num_nodes, executor, [] { return Memory{}; },
      [&](Memory& memory, int64_t ego) { all_blocks(serial, memory, ego); },
      [&](int64_t ego) {
        Memory memory;
        all_blocks(executor, memory, ego);
      });
}

}  // namespace

void cluster_scatter(const ScatterForward& call, const Executor& executor) {
  with_types(call.dtype, *call.graph, [&](auto storage, auto index) {
    run_forward<decltype(storage), decltype(index)>(call, executor);
  });
}

void cluster_scatter_backward(const ScatterBackward& call, const Executor& executor) {
  with_types(call.dtype, *call.graph, [&](auto storage, auto index) {
    run_backward<decltype(storage), decltype(index)>(call, executor);
  });
}

}  // namespace dcgnn::cpu::DCGNN_ISA
