// The broadcast and the node update around it,
//   out_i = a_i x_i + b_i sum_j P^Omega_ij M^Omega_j + c_i sum_{egos u of i} w_u sum_j P^u_ij
//   C^u_j,
// as one gather over the transpose: the dense part is added while a node's sum is still in cache.
//
// Backward is one gather over the egos, with h_i = c_i grad_i: grad_assign_uj = w C_j . h_u and
// grad_clusters_j = w sum_u P_uj h_u; and one dense pass over the nodes, which is the same
// computation on consecutive rows: grad_global_assign_ij = b_i M_j . grad_i and
// grad_global_message_j = sum_i b_i P_ij grad_i.
#include "problem.h"
#include "segments.h"
#include "tables.h"

namespace dcgnn::cpu::DCGNN_ISA {
namespace {

// NumClusters 0: known at run time only.
template <int NumClusters, class T, class Entries>
void gather_clusters(const Entries& entries, int64_t begin, int64_t end, int64_t num_clusters,
                     int64_t channels, const T* assign, const T* clusters, const Acc<T>* ego_factor,
                     Acc<T>* out) {
  using A = Acc<T>;
  const int64_t count = NumClusters == 0 ? num_clusters : NumClusters;
  for_each_slice<A, kSliceVectors>(channels, [&](auto slice) {
    constexpr int NV = decltype(slice)::kVectors;
    Vec<A> acc[NV] = {};
    for (int64_t k = begin; k < end; ++k) {
      if (slice.first == 0) entries.prefetch(k);
      const int64_t ego = entries.problem(k);
      const A factor = ego_factor == nullptr ? A(1) : ego_factor[ego];
      const T* weight = assign + entries.slot(k) * count;
      const T* cluster = clusters + ego * count * channels;
      for (int64_t j = 0; j < count; ++j) {
        const A p = factor * to_acc(weight[j]);
        for (int v = 0; v < NV; ++v) acc[v] += p * slice.load(cluster + j * channels, v);
      }
    }
    for (int v = 0; v < NV; ++v) slice.store(out, v, acc[v]);
  });
}

template <class A>
DCGNN_INLINE const A* factors(const void* array) {
  return static_cast<const A*>(array);
}

// sums = activation(a x + b P^Omega M^Omega + c sums), for one node.
template <class T>
void add_dense_part(const NodeUpdate& update, int64_t node, int64_t channels, Acc<T>* sums) {
  using A = Acc<T>;
  const T* x = static_cast<const T*>(update.x) + node * channels;
  const T* assign = static_cast<const T*>(update.global_assign) + node * update.num_global;
  const T* message = static_cast<const T*>(update.global_message);
  const A x_factor = factors<A>(update.x_factor)[node];
  const A global_factor = factors<A>(update.global_factor)[node];
  const A local_factor = factors<A>(update.local_factor)[node];
  for_each_slice<A, 4>(channels, [&](auto slice) {
    constexpr int NV = decltype(slice)::kVectors;
    Vec<A> acc[NV];
    for (int v = 0; v < NV; ++v) {
      acc[v] = x_factor * slice.load(x, v) + local_factor * slice.load(sums, v);
    }
    for (int64_t j = 0; j < update.num_global; ++j) {
      const A p = global_factor * to_acc(assign[j]);
      for (int v = 0; v < NV; ++v) acc[v] += p * slice.load(message + j * channels, v);
    }
    for (int v = 0; v < NV; ++v) {
      if (update.activation == Activation::kRelu) acc[v] = acc[v] < 0 ? Vec<A>{} : acc[v];
      if (update.activation == Activation::kTanh) acc[v] = vtanh<A>(acc[v]);
      slice.store(sums, v, acc[v]);
    }
  });
}

template <class T>
void run_forward(const ScatterForward& call, const Executor& executor) {
  using A = Acc<T>;
  const GraphView graph(*call.graph);
  const int64_t num_clusters = call.num_clusters, channels = call.channels;
  const T* assign = static_cast<const T*>(call.assign);
  const T* clusters = static_cast<const T*>(call.clusters);
  const A* ego_factor = factors<A>(call.update.ego_factor);
  const auto out = output_rows<T>(call.out, graph.num_nodes, channels);
  const auto fetch = [=](int64_t ego, int64_t slot) {
    prefetch_row(clusters + ego * num_clusters * channels, num_clusters * channels);
    prefetch_line(assign + slot * num_clusters);
    if (ego_factor != nullptr) prefetch_line(ego_factor + ego);
  };
  const int64_t fetched = num_clusters * channels * static_cast<int64_t>(sizeof(T));
  with_transpose_entries(graph, fetched, fetch, [&](const auto& entries) {
    using Entries = std::decay_t<decltype(entries)>;
    const auto gather =
        num_clusters == 2 ? gather_clusters<2, T, Entries> : gather_clusters<0, T, Entries>;
    sum_segment_blocks<A>(
        graph.colptr, graph.num_nodes, channels, executor,
        [&](int64_t, int64_t begin, int64_t end, A* sums) {
          gather(entries, begin, end, num_clusters, channels, assign, clusters, ego_factor, sums);
        },
        [&](int64_t node, A* sums) {
          if (call.update.x != nullptr) add_dense_part<T>(call.update, node, channels, sums);
          write_row(out + node * channels, sums, channels);
        });
  });
}

// One block of rows with weights P [count, K] and vectors C [K, F], where row u counts factor(u)
// times: products_uj = factor(u) C_j . row_u, sums_j = sum_u factor(u) P_uj row_u.
template <class T, class Factor>
void backward_block(const GatheredRows<T>& rows, int64_t count, int64_t num_clusters,
                    const T* assign, const T* clusters, const Factor& factor, T* products,
                    Acc<T>* columns, Acc<T>* sums) {
  using A = Acc<T>;
  const int64_t stride = column_stride<A>(kBlockRows);
  reduce_rows_by_all<Dots, true>(rows, count, clusters, num_clusters, columns, stride);
  for (int64_t u = 0; u < count; ++u) {
    const A scale = factor(u);
    for (int64_t j = 0; j < num_clusters; ++j) {
      A* value = columns + j * stride + u;
      products[u * num_clusters + j] = from_acc<T>(scale * *value);
      *value = scale * to_acc(assign[u * num_clusters + j]);
    }
  }
  weighted_sums_of_all<false>(rows, count, columns, stride, num_clusters,
                              static_cast<const T*>(nullptr), sums);
}

template <class A>
struct Memory {
  Buffer<A> columns, sums;
};

// backward_block over all blocks of `count` rows, and the sum of their sums, in order, as sums_out;
// then(from, to) follows when those rows have had their visit.
template <class T, class Factor, class Then>
void backward_blocks(const Executor& executor, Memory<Acc<T>>& memory, const GatheredRows<T>& rows,
                     int64_t count, int64_t num_clusters, const T* assign, const T* clusters,
                     const Factor& factor, T* products, const OutputRows<T>& sums_out,
                     const Then& then) {
  using A = Acc<T>;
  const int64_t width = num_clusters * rows.channels;
  const int64_t num_blocks = (count + kBlockRows - 1) / kBlockRows;
  A* partials = memory.sums.reserve(num_blocks * width);
  executor.run(num_blocks, [&](int64_t first, int64_t last) {
    Memory<A> own;
    Memory<A>& used = num_blocks == 1 ? memory : own;
    A* columns = used.columns.reserve(num_clusters * column_stride<A>(kBlockRows));
    for (int64_t block = first; block < last; ++block) {
      const int64_t from = block * kBlockRows;
      const int64_t size = count - from < kBlockRows ? count - from : kBlockRows;
      backward_block(
          rows.from(from), size, num_clusters, assign + from * num_clusters, clusters,
          [&](int64_t u) { return factor(from + u); }, products + from * num_clusters, columns,
          partials + block * width);
      then(from, from + size);
    }
  });
  for (int64_t block = 1; block < num_blocks; ++block) {
    for (int64_t f = 0; f < width; ++f) partials[f] += partials[block * width + f];
  }
  write_rows(sums_out, partials, num_clusters, rows.channels);
}

// out_i = factor_i rows_i for some nodes.
template <class T>
void scale_rows(int64_t begin, int64_t end, int64_t channels, const Acc<T>* factor, const T* rows,
                const OutputRows<T>& out) {
  using A = Acc<T>;
  for (int64_t node = begin; node < end; ++node) {
    for_each_slice<A, 4>(channels, [&](auto slice) {
      slice.write(out + node * channels,
                  [&](int v) { return factor[node] * slice.load(rows + node * channels, v); });
    });
  }
  stream_fence();
}

template <class T>
void run_backward(const ScatterBackward& call, const Executor& executor) {
  using A = Acc<T>;
  const GraphView graph(*call.graph);
  const NodeUpdate& update = call.update;
  const int64_t num_clusters = call.num_clusters, channels = call.channels;
  const IndexArray rowptr = graph.rowptr;
  const T* grad = static_cast<const T*>(call.grad);
  T* grad_x = static_cast<T*>(call.grad_x);
  const A* ego_factor = factors<A>(update.ego_factor);
  // The rows to gather, h, wait in grad_x for their turn: they are scaled once, not once a slot,
  // and unlike an incoming gradient grad_x lies in huge pages.
  const T* scaled = grad;
  if (update.x != nullptr) {
    executor.run((graph.num_nodes + kBlockRows - 1) / kBlockRows, [&](int64_t begin, int64_t end) {
      const int64_t last = end * kBlockRows < graph.num_nodes ? end * kBlockRows : graph.num_nodes;
      scale_rows(begin * kBlockRows, last, channels, factors<A>(update.local_factor), grad,
                 output_rows<T>(grad_x, graph.num_nodes, channels));
    });
    scaled = grad_x;
  }
  const auto grad_clusters =
      output_rows<T>(call.grad_clusters, graph.num_egos * num_clusters, channels);
  const auto solve = [&](const Executor& blocks, Memory<A>& memory, int64_t ego) {
    const int64_t begin = rowptr[ego], end = rowptr[ego + 1];
    const GatheredRows<T> rows{scaled, channels, graph.member, graph.num_slots, begin};
    const A weight = ego_factor == nullptr ? A(1) : ego_factor[ego];
    backward_blocks<T>(
        blocks, memory, rows, end - begin, num_clusters,
        static_cast<const T*>(call.assign) + begin * num_clusters,
        static_cast<const T*>(call.clusters) + ego * num_clusters * channels,
        [=](int64_t) { return weight; }, static_cast<T*>(call.grad_assign) + begin * num_clusters,
        grad_clusters + ego * num_clusters * channels, [](int64_t, int64_t) {});
  };
  const SerialExecutor serial;
  for_each_segment(
      rowptr, graph.num_egos, executor, [] { return Memory<A>{}; },
      [&](Memory<A>& memory, int64_t ego) { solve(serial, memory, ego); },
      [&](int64_t ego) {
        Memory<A> memory;
        solve(executor, memory, ego);
      });
  if (update.x == nullptr) return;

  const A* global_factor = factors<A>(update.global_factor);
  Memory<A> memory;
  backward_blocks<T>(
      executor, memory, consecutive_rows(grad, channels, graph.num_nodes), graph.num_nodes,
      update.num_global, static_cast<const T*>(update.global_assign),
      static_cast<const T*>(update.global_message),
      [=](int64_t node) { return global_factor[node]; }, static_cast<T*>(call.grad_global_assign),
      output_rows<T>(call.grad_global_message, update.num_global, channels),
      [&](int64_t from, int64_t to) {
        scale_rows(from, to, channels, factors<A>(update.x_factor), grad,
                   output_rows<T>(grad_x, graph.num_nodes, channels));
      });
}

}  // namespace

void cluster_scatter(const ScatterForward& call, const Executor& executor) {
  with_storage(call.dtype, [&](auto storage) { run_forward<decltype(storage)>(call, executor); });
}

void cluster_scatter_backward(const ScatterBackward& call, const Executor& executor) {
  with_storage(call.dtype, [&](auto storage) { run_backward<decltype(storage)>(call, executor); });
}

}  // namespace dcgnn::cpu::DCGNN_ISA
