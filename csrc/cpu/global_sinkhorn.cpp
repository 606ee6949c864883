// One transport problem between all nodes and the global cluster-nodes: the same solver as for an
// ego, on consecutive rows, always in blocks that all threads share. Each iteration reads the N x
// Omega logits once.
#include "segments.h"
#include "tables.h"
#include "transport.h"

namespace dcgnn::cpu::DCGNN_ISA {
namespace {

// Every node is in the one problem, at the slot of its own number.
struct OneProblem {
  DCGNN_INLINE int64_t problem(int64_t) const { return 0; }
  DCGNN_INLINE int64_t slot(int64_t node) const { return node; }
  DCGNN_INLINE void prefetch(int64_t) const {}
};

template <class T>
bool run_forward(const SinkhornForward& call, const Executor& executor) {
  using A = Acc<T>;
  TransportSolver<T, ConsecutiveRows<T>> solver(call.transport, executor);
  return solver.forward({static_cast<const T*>(call.z), call.transport.channels}, call.num_nodes,
                        static_cast<const T*>(call.centroids), static_cast<T*>(call.assign),
                        static_cast<T*>(call.clusters), static_cast<A*>(call.potentials));
}

template <class T>
void run_backward(const SinkhornBackward& call, const Executor& executor) {
  using A = Acc<T>;
  const int64_t clusters = call.transport.num_clusters, channels = call.transport.channels;
  const T* z = static_cast<const T*>(call.z);
  const T* centroids = static_cast<const T*>(call.centroids);
  const T* grad_clusters = static_cast<const T*>(call.grad_clusters);
  Buffer<A> buffer;
  A* coefficients = buffer.reserve(call.num_nodes * 2 * clusters);
  TransportSolver<T, ConsecutiveRows<T>> solver(call.transport, executor);
  solver.backward({z, channels}, call.num_nodes, centroids, static_cast<const A*>(call.potentials),
                  static_cast<const T*>(call.grad_assign), grad_clusters, coefficients,
                  static_cast<T*>(call.grad_centroids));
  const auto gather = grad_clusters == nullptr ? gather_node_gradient<false, T, OneProblem>
                                               : gather_node_gradient<true, T, OneProblem>;
  const int64_t num_blocks = (call.num_nodes + kBlockRows - 1) / kBlockRows;
  executor.run(num_blocks, [&](int64_t begin, int64_t end) {
    Buffer<A> row;
    A* sums = row.reserve(channels);
    const int64_t last = end * kBlockRows < call.num_nodes ? end * kBlockRows : call.num_nodes;
    for (int64_t node = begin * kBlockRows; node < last; ++node) {
      gather(OneProblem{}, node, node + 1, clusters, channels, coefficients, z + node * channels,
             centroids, grad_clusters, sums);
      T* out = static_cast<T*>(call.grad_z) + node * channels;
      for (int64_t f = 0; f < channels; ++f) out[f] = from_acc<T>(sums[f]);
    }
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
