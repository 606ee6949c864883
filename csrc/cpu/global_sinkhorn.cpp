// One transport problem between all nodes and the global cluster-nodes: the same solvers as for an
// ego, on consecutive rows, always in blocks that all threads share. Each iteration reads the N x
// Omega logits once.
#include "pair_transport.h"
#include "segments.h"
#include "tables.h"
#include "transport.h"

namespace dcgnn::cpu::DCGNN_ISA {
namespace {

// Every node is in the one problem, at the slot of its own number.
struct OneProblem {
  static constexpr int64_t count = 0, distance = 0;  // nothing to prefetch
  DCGNN_INLINE int64_t problem(int64_t) const { return 0; }
  DCGNN_INLINE int64_t slot(int64_t node) const { return node; }
  DCGNN_INLINE void prefetch(int64_t) const {}
};

template <class T>
bool run_forward(const SinkhornForward& call, const Executor& executor) {
  using A = Acc<T>;
  const auto rows =
      consecutive_rows(static_cast<const T*>(call.z), call.transport.channels, call.num_nodes);
  const T* centroids = static_cast<const T*>(call.centroids);
  if (call.transport.num_clusters == 2) {
    return PairSolver<T>(call.transport, executor)
        .forward(rows, call.num_nodes, PairStart<T>{centroids, nullptr},
                 static_cast<T*>(call.assign), OutputRows<T>{static_cast<T*>(call.clusters), false},
                 static_cast<A*>(call.potentials));
  }
  return TransportSolver<T>(call.transport, executor)
      .forward(rows, call.num_nodes, centroids, static_cast<T*>(call.assign),
               static_cast<T*>(call.clusters), static_cast<A*>(call.potentials));
}

template <class T>
void run_backward(const SinkhornBackward& call, const Executor& executor) {
  using A = Acc<T>;
  const int64_t clusters = call.transport.num_clusters, channels = call.transport.channels;
  const T* z = static_cast<const T*>(call.z);
  const auto rows = consecutive_rows(z, channels, call.num_nodes);
  const T* centroids = static_cast<const T*>(call.centroids);
  const A* potentials = static_cast<const A*>(call.potentials);
  const T* grad_assign = static_cast<const T*>(call.grad_assign);
  const T* grad_clusters = static_cast<const T*>(call.grad_clusters);
  T* grad_centroids = static_cast<T*>(call.grad_centroids);
  A* coefficients = static_cast<A*>(call.coefficients);
  T* table = static_cast<T*>(call.table);
  const auto grad_z = output_rows<T>(call.grad_z, call.num_nodes, channels);
  if (clusters != 2) {
    TransportSolver<T> solver(call.transport, executor);
    solver.backward(rows, call.num_nodes, centroids, potentials, grad_assign, grad_clusters,
                    {nullptr, grad_z}, grad_centroids);
    return;
  }
  A* scale_weight = coefficients + 2 * call.num_nodes;
  PairSolver<T> solver(call.transport, executor);
  solver.backward(rows, call.num_nodes, {centroids, nullptr}, potentials, grad_assign,
                  grad_clusters, coefficients, scale_weight,
                  {{table, false}, grad_centroids, nullptr, false});
  const int64_t num_blocks = (call.num_nodes + kBlockRows - 1) / kBlockRows;
  executor.run(num_blocks, [&](int64_t begin, int64_t end) {
    Buffer<A> row;
    A* sums = row.reserve(channels);
    const int64_t last = end * kBlockRows < call.num_nodes ? end * kBlockRows : call.num_nodes;
    for (int64_t node = begin * kBlockRows; node < last; ++node) {
      gather_pair_gradient(OneProblem{}, node, node + 1, channels, coefficients, scale_weight,
                           table, 0, z + node * channels, centroids, 0, sums);
      write_row(grad_z + node * channels, sums, channels);
    }
    stream_fence();
  });
}

}  // namespace

bool global_sinkhorn(const SinkhornForward& call, const Executor& executor) {
  bool finite = true;
  with_storage(call.dtype,
               [&](auto storage) { finite = run_forward<decltype(storage)>(call, executor); });
  return finite;
}

void global_sinkhorn_backward(const SinkhornBackward& call, const Executor& executor) {
  with_storage(call.dtype, [&](auto storage) { run_backward<decltype(storage)>(call, executor); });
}

}  // namespace dcgnn::cpu::DCGNN_ISA
