// One transport problem for every ego. Forward: one visit to each ego, egos cut into tasks by
// slots. Backward: one visit to each ego for grad_centroids and the coefficients of its slots, then
// a gather over the transpose for grad_z. Nothing of size S x F is ever stored.
#include <atomic>

#include "segments.h"
#include "tables.h"
#include "transport.h"

namespace dcgnn::cpu::DCGNN_ISA {
namespace {

template <class T, class Index>
using EgoSolver = TransportSolver<T, GatheredRows<T, Index>>;

template <class T, class Index>
GatheredRows<T, Index> ego_rows(const Graph& graph, const T* z, int64_t channels, int64_t ego) {
  const Index* member = index_array<Index>(graph.member);
  return {z, channels, member + index_array<Index>(graph.rowptr)[ego], member + graph.num_slots};
}

template <class T, class Index>
bool run_forward(const SinkhornForward& call, const Executor& executor) {
  using A = Acc<T>;
  const Graph& graph = *call.graph;
  const Transport& transport = call.transport;
  const int64_t clusters = transport.num_clusters, channels = transport.channels;
  const int64_t steps = transport.num_iters == 0 ? 1 : transport.num_iters;
  const Index* rowptr = index_array<Index>(graph.rowptr);
  const T* z = static_cast<const T*>(call.z);
  std::atomic<bool> finite{true};
  const auto solve = [&](auto& solver, int64_t ego) {
    const int64_t begin = rowptr[ego], width = clusters * channels;
    const bool ok =
        solver.forward(ego_rows<T, Index>(graph, z, channels, ego), rowptr[ego + 1] - begin,
                       static_cast<const T*>(call.centroids) + ego * width,
                       static_cast<T*>(call.assign) + begin * clusters,
                       static_cast<T*>(call.clusters) + ego * width,
                       static_cast<A*>(call.potentials) + ego * steps * clusters);
    if (!ok) finite.store(false, std::memory_order_relaxed);
  };
  const SerialExecutor serial;
  for_each_segment(
      rowptr, graph.num_nodes, executor, [&] { return EgoSolver<T, Index>(transport, serial); },
      solve,
      [&](int64_t ego) {
        EgoSolver<T, Index> solver(transport, executor);
        solve(solver, ego);
      });
  return finite.load();
}

template <class T, class Index>
void run_backward(const SinkhornBackward& call, const Executor& executor) {
  using A = Acc<T>;
  const Graph& graph = *call.graph;
  const Transport& transport = call.transport;
  const int64_t clusters = transport.num_clusters, channels = transport.channels;
  const int64_t width = clusters * channels;
  const int64_t steps = transport.num_iters == 0 ? 1 : transport.num_iters;
  const Index* rowptr = index_array<Index>(graph.rowptr);
  const T* z = static_cast<const T*>(call.z);
  const T* centroids = static_cast<const T*>(call.centroids);
  const T* grad_assign = static_cast<const T*>(call.grad_assign);
  const T* grad_clusters = static_cast<const T*>(call.grad_clusters);
  Buffer<A> buffer;
  A* coefficients = buffer.reserve(graph.num_slots * 2 * clusters);
  const auto solve = [&](auto& solver, int64_t ego) {
    const int64_t begin = rowptr[ego];
    solver.backward(
        ego_rows<T, Index>(graph, z, channels, ego), rowptr[ego + 1] - begin,
        centroids + ego * width, static_cast<const A*>(call.potentials) + ego * steps * clusters,
        grad_assign == nullptr ? nullptr : grad_assign + begin * clusters,
        grad_clusters == nullptr ? nullptr : grad_clusters + ego * width,
        coefficients + begin * 2 * clusters, static_cast<T*>(call.grad_centroids) + ego * width);
  };
  const SerialExecutor serial;
  for_each_segment(
      rowptr, graph.num_nodes, executor, [&] { return EgoSolver<T, Index>(transport, serial); },
      solve,
      [&](int64_t ego) {
        EgoSolver<T, Index> solver(transport, executor);
        solve(solver, ego);
      });

  const auto fetch = [&](int64_t ego, int64_t slot) {
    prefetch_row(centroids + ego * width, width);
    if (grad_clusters != nullptr) prefetch_row(grad_clusters + ego * width, width);
    __builtin_prefetch(coefficients + slot * 2 * clusters);
  };
  const TransposeEntries<Index, decltype(fetch)> entries{
      index_array<Index>(graph.ego), index_array<Index>(graph.slot), graph.num_slots, fetch};
  sum_segments(index_array<Index>(graph.colptr), graph.num_nodes, channels,
               static_cast<T*>(call.grad_z), executor,
               [&](int64_t node, int64_t begin, int64_t end, A* sums) {
                 const auto gather = grad_clusters == nullptr
                                         ? gather_node_gradient<false, T, decltype(entries)>
                                         : gather_node_gradient<true, T, decltype(entries)>;
                 gather(entries, begin, end, clusters, channels, coefficients, z + node * channels,
                        centroids, grad_clusters, sums);
               });
}

}  // namespace

bool local_sinkhorn(const SinkhornForward& call, const Executor& executor) {
  bool finite = true;
  with_types(call.dtype, *call.graph, [&](auto storage, auto index) {
    finite = run_forward<decltype(storage), decltype(index)>(call, executor);
  });
  return finite;
}

void local_sinkhorn_backward(const SinkhornBackward& call, const Executor& executor) {
  with_types(call.dtype, *call.graph, [&](auto storage, auto index) {
    run_backward<decltype(storage), decltype(index)>(call, executor);
  });
}

}  // namespace dcgnn::cpu::DCGNN_ISA
