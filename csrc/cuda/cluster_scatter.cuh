// The broadcast and, when there is a dense part, the node update around it:
//   out_i = act(a_i x_i + b_i sum_j P^Omega_ij M^Omega_j
//               + c_i sum_{egos u of i} w_u sum_j P^u_ij C^u_j),
// a gather over the transpose (colptr, ego, slot). Work is split as segments.cuh says; the dense
// part is added by the lanes that hold a node's finished sum.
#pragma once

#include "segments.cuh"

namespace dcgnn::cuda {

template <class T, class Index>
struct ForwardParams {
  const Index* colptr;
  const Index* ego;
  const Index* slot;
  int64_t num_nodes;
  int64_t num_slots;
  int64_t num_clusters;
  int64_t channels;
  const T* assign;
  const T* clusters;
  T* out;
  Acc<T>* partials;
  const T* x;
  const T* global_assign;
  const T* global_message;
  const Acc<T>* ego_factor;
  const Acc<T>* x_factor;
  const Acc<T>* global_factor;
  const Acc<T>* local_factor;
  int64_t num_global;
  int activation;
  int lanes;
};

DCGNN_DEVICE float hyperbolic_tangent(float value) { return tanhf(value); }
DCGNN_DEVICE double hyperbolic_tangent(double value) { return tanh(value); }

template <class A>
DCGNN_DEVICE A activate(A value, int activation) {
  if (activation == int(Activation::kTanh)) return hyperbolic_tangent(value);
  // A NaN stays one.
  if (activation == int(Activation::kRelu)) return value < A(0) ? A(0) : value;
  return value;
}

// sums += the messages of these entries, channels channel .. channel + kVector - 1. kClusters 0:
// their number is known at run time only. Loads of several entries are in flight together.
template <int kVector, int kClusters, class T, class Index>
DCGNN_DEVICE void gather_messages(const ForwardParams<T, Index>& params, const Task& task,
                                  int64_t channel, Acc<T>* sums) {
  using A = Acc<T>;
  using Row = Pack<kVector, T>;
  constexpr int kBatch = kClusters > 1 ? 2 : 4;
  constexpr int kTile = kClusters == 0 ? 1 : kClusters;
  const int64_t num_clusters = kClusters == 0 ? params.num_clusters : kClusters;
  if (channel >= params.channels) return;
  const Index* egos = params.ego + task.begin;
  const Index* slots = params.slot + task.begin;
  for (int first = 0; first < task.count; first += kBatch * task.step) {
    Index ego[kBatch], slot[kBatch];
    A factor[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int entry = first + b * task.step;
      const bool valid = entry < task.count;
      ego[b] = valid ? load_constant(egos + entry) : Index(-1);
      slot[b] = valid ? load_constant(slots + entry) : Index(0);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      factor[b] = A(1);
      if (params.ego_factor != nullptr && ego[b] >= 0) {
        factor[b] = load_constant(params.ego_factor + ego[b]);
      }
    }
#pragma unroll 1
    for (int64_t tile = 0; tile < num_clusters; tile += kTile) {
      Row rows[kBatch][kTile];
      A weights[kBatch][kTile];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
#pragma unroll
        for (int j = 0; j < kTile; ++j) {
          rows[b][j] = Row::zero();
          weights[b][j] = A(0);
          if (ego[b] >= 0) {
            weights[b][j] =
                widen(load_one(params.assign + int64_t(slot[b]) * num_clusters + tile + j));
            rows[b][j] =
                Row::load(params.clusters +
                          (int64_t(ego[b]) * num_clusters + tile + j) * params.channels + channel);
          }
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
#pragma unroll
        for (int j = 0; j < kTile; ++j) {
          const A weight = factor[b] * weights[b][j];
#pragma unroll
          for (int v = 0; v < kVector; ++v) sums[v] += weight * rows[b][j][v];
        }
      }
    }
  }
}

// Adds the dense part to a finished sum, applies the activation and writes the channels.
template <int kVector, class T, class Index>
DCGNN_DEVICE void store_node(const ForwardParams<T, Index>& params, int64_t node, int64_t channel,
                             Acc<T>* sums) {
  using A = Acc<T>;
  using Row = Pack<kVector, T>;
  if (params.x != nullptr) {
    const A local_factor = load_constant(params.local_factor + node);
    const A x_factor = load_constant(params.x_factor + node);
    const A global_factor = load_constant(params.global_factor + node);
    const Row x = Row::load(params.x + node * params.channels + channel);
#pragma unroll
    for (int v = 0; v < kVector; ++v) sums[v] = x_factor * x[v] + local_factor * sums[v];
    // The messages are the same for all nodes, hence in cache: few need to be in flight.
#pragma unroll 2
    for (int64_t j = 0; j < params.num_global; ++j) {
      const A weight =
          global_factor * widen(load_one(params.global_assign + node * params.num_global + j));
      const Row message = Row::load(params.global_message + j * params.channels + channel);
#pragma unroll
      for (int v = 0; v < kVector; ++v) sums[v] += weight * message[v];
    }
  }
#pragma unroll
  for (int v = 0; v < kVector; ++v) sums[v] = activate(sums[v], params.activation);
  Row::store(params.out + node * params.channels + channel, sums);
}

// Blocks that must fit on a multiprocessor: as many registers as the batch needs without spilling.
template <class T>
constexpr int kForwardBlocks = sizeof(T) == 4 ? 3 : 2;

template <int kVector, int kClusters, class T, class Index>
__global__ void __launch_bounds__(kBlockThreads, kForwardBlocks<T>)
    cluster_scatter_kernel(const ForwardParams<T, Index> params) {
  using A = Acc<T>;
  const Group group(params.lanes);
  for_each_task(params.colptr, params.num_nodes, params.num_slots, group, [&](const Task& task) {
    for (int64_t first = 0; first < params.channels; first += group.lanes * kVector) {
      const int64_t channel = first + group.lane * kVector;
      A sums[kVector] = {};
      gather_messages<kVector, kClusters>(params, task, channel, sums);
      if (task.shared) add_groups<kVector>(group, sums);
      if (!writes(group, task) || channel >= params.channels) continue;
      if (task.piece < 0) {
        store_node<kVector>(params, task.segment, channel, sums);
      } else {
        store_partial<kVector>(params.partials + task.piece * params.channels + channel, sums);
      }
    }
  });
}

template <class T, class Index>
__global__ void __launch_bounds__(kBlockThreads, 2)
    cluster_scatter_hubs_kernel(const ForwardParams<T, Index> params) {
  finish_hubs(params.colptr, params.num_nodes, params.num_slots, params.channels, params.partials,
              [&](int64_t node, int64_t channel, Acc<T> sum) {
                store_node<1>(params, node, channel, &sum);
              });
}

}  // namespace dcgnn::cuda
