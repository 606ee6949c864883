// Which kernel serves a call, and with what grid. Launches go through a functor
//   launch(kernel, blocks, params),
// so that the same choice runs on a stream (launch.cu) and on the host (the tests).
#pragma once

#include <initializer_list>

#include "cluster_scatter.cuh"
#include "cluster_scatter_backward.cuh"

namespace dcgnn::cuda {

// Rows can be read in vectors when every row of every array begins at a multiple of 16 bytes.
inline bool rows_fit_vectors(int64_t row_bytes, std::initializer_list<const void*> arrays) {
  bool fit = row_bytes % 16 == 0;
  for (const void* array : arrays) fit = fit && reinterpret_cast<uintptr_t>(array) % 16 == 0;
  return fit;
}

inline int64_t blocks_for(int64_t warps, int64_t max_blocks) {
  const int64_t blocks = (warps + kBlockWarps - 1) / kBlockWarps;
  return blocks < max_blocks ? blocks : max_blocks;
}

// Warps that have work: chunks of hubs and tiles of segments.
inline int64_t warps_for(int64_t num_segments, int64_t num_slots, int lanes) {
  const int groups = kWarpLanes / lanes;
  return num_chunks(num_slots) + (num_segments + groups - 1) / groups;
}

// choose<kVector, kClusters>() for the numbers of a call. Rows that vectors do not fit are rare and
// slower anyway: they share the kernel for any number of clusters.
template <class T, class Choose>
void with_instance(bool vectors, int64_t num_clusters, const Choose& choose) {
  constexpr int kVector = kFullVector<T>;
  if (!vectors) return choose.template operator()<1, 0>();
  switch (num_clusters) {
    case 1:
      return choose.template operator()<kVector, 1>();
    case 2:
      return choose.template operator()<kVector, 2>();
    case 3:
      return choose.template operator()<kVector, 3>();
    case 4:
      return choose.template operator()<kVector, 4>();
    default:
      return choose.template operator()<kVector, 0>();
  }
}

template <class T, class Index, class Launch>
struct ForwardChoice {
  ForwardParams<T, Index> params;
  int64_t max_blocks;
  const Launch& launch;

  template <int kVector, int kClusters>
  void operator()() const {
    ForwardParams<T, Index> chosen = params;
    chosen.lanes = lanes_for_row(params.channels, kVector);
    const int64_t warps = warps_for(params.num_nodes, params.num_slots, chosen.lanes);
    launch(cluster_scatter_kernel<kVector, kClusters, T, Index>, blocks_for(warps, max_blocks),
           chosen);
  }
};

template <class T, class Index, class Launch>
struct BackwardChoice {
  BackwardParams<T, Index> params;
  int64_t max_blocks;
  const Launch& launch;

  template <int kVector, int kClusters>
  void operator()() const {
    BackwardParams<T, Index> chosen = params;
    chosen.lanes = lanes_for_row(params.channels, kVector);
    const int64_t warps = warps_for(params.num_egos, params.num_slots, chosen.lanes);
    const int64_t blocks = blocks_for(warps, max_blocks);
    if (params.channels <= chosen.lanes * kVector) {
      launch(cluster_scatter_backward_kernel<kVector, kClusters, false, T, Index>, blocks, chosen);
    } else {
      // The usual number of clusters, and any.
      constexpr int kWideClusters = kClusters == 2 ? 2 : 0;
      launch(cluster_scatter_backward_kernel<kVector, kWideClusters, true, T, Index>, blocks,
             chosen);
    }
  }
};

template <class T, class Index, class Launch>
void run_forward(const ScatterForward& call, int64_t max_blocks, const Launch& launch) {
  using A = Acc<T>;
  const Graph& graph = call.graph;
  const NodeUpdate& update = call.update;
  if (graph.num_nodes == 0 || call.channels == 0) return;
  const ForwardParams<T, Index> params{static_cast<const Index*>(graph.colptr),
                                       static_cast<const Index*>(graph.ego),
                                       static_cast<const Index*>(graph.slot),
                                       graph.num_nodes,
                                       graph.num_slots,
                                       call.num_clusters,
                                       call.channels,
                                       static_cast<const T*>(call.assign),
                                       static_cast<const T*>(call.clusters),
                                       static_cast<T*>(call.out),
                                       static_cast<A*>(call.workspace),
                                       static_cast<const T*>(update.x),
                                       static_cast<const T*>(update.global_assign),
                                       static_cast<const T*>(update.global_message),
                                       static_cast<const A*>(update.ego_factor),
                                       static_cast<const A*>(update.x_factor),
                                       static_cast<const A*>(update.global_factor),
                                       static_cast<const A*>(update.local_factor),
                                       update.num_global,
                                       static_cast<int>(update.activation),
                                       0};
  const bool vectors = rows_fit_vectors(call.channels * int64_t{sizeof(T)},
                                        {call.clusters, call.out, update.x, update.global_message});
  with_instance<T>(vectors, call.num_clusters,
                   ForwardChoice<T, Index, Launch>{params, max_blocks, launch});
  const int64_t chunks = num_chunks(graph.num_slots);
  if (chunks > 0) {
    launch(cluster_scatter_hubs_kernel<T, Index>, chunks < max_blocks ? chunks : max_blocks,
           params);
  }
}

template <class T, class Index, class Launch>
void run_backward(const ScatterBackward& call, int64_t max_blocks, const Launch& launch) {
  using A = Acc<T>;
  const Graph& graph = call.graph;
  if (graph.num_egos == 0 || call.num_clusters == 0) return;
  const BackwardParams<T, Index> params{static_cast<const Index*>(graph.rowptr),
                                        static_cast<const Index*>(graph.member),
                                        graph.num_egos,
                                        graph.num_slots,
                                        call.num_clusters,
                                        call.channels,
                                        static_cast<const T*>(call.grad),
                                        static_cast<const T*>(call.assign),
                                        static_cast<const T*>(call.clusters),
                                        static_cast<T*>(call.grad_assign),
                                        static_cast<T*>(call.grad_clusters),
                                        static_cast<A*>(call.workspace),
                                        static_cast<const A*>(call.update.ego_factor),
                                        static_cast<const A*>(call.update.local_factor),
                                        0};
  const bool vectors = rows_fit_vectors(call.channels * int64_t{sizeof(T)},
                                        {call.grad, call.clusters, call.grad_clusters});
  with_instance<T>(vectors, call.num_clusters,
                   BackwardChoice<T, Index, Launch>{params, max_blocks, launch});
  const int64_t chunks = num_chunks(graph.num_slots);
  if (chunks > 0 && call.channels > 0) {
    launch(cluster_scatter_backward_hubs_kernel<T, Index>,
           chunks < max_blocks ? chunks : max_blocks, params);
  }
}

}  // namespace dcgnn::cuda
