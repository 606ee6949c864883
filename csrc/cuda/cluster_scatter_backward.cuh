// Backward of the broadcast, one gather over the egos (rowptr, member). With h_i = c_i grad_i:
//   grad_assign^u_ij = w_u C^u_j . h_i        for every member i of ego u
//   grad_clusters^u_j = w_u sum_i P^u_ij h_i
// Work is split as segments.cuh says. A row of grad is read once for both where a warp can hold a
// whole row (16 bytes a lane: F <= 128 for float32, 256 for 16-bit types, 64 for float64), and once
// for each of them where it cannot.
#pragma once

#include "segments.cuh"

namespace dcgnn::cuda {

template <class T, class Index>
struct BackwardParams {
  const Index* rowptr;
  const Index* member;
  int64_t num_egos;
  int64_t num_slots;
  int64_t num_clusters;
  int64_t channels;
  const T* grad;
  const T* assign;
  const T* clusters;
  T* grad_assign;
  T* grad_clusters;
  Acc<T>* partials;
  const Acc<T>* ego_factor;
  const Acc<T>* local_factor;
  int lanes;
};

// Entries that are in flight together. Four, the smallest group: see reduce_batch.
constexpr int kBatch = kMinimumLanes;

// kTile clusters of one ego, from cluster `first` on; the last tile of many may have fewer.
template <int kVector, int kClusters, class T, class Index>
struct ClusterTile {
  static constexpr int kTile = kClusters == 0 ? 4 : kClusters;
  using A = Acc<T>;
  using Row = Pack<kVector, T>;

  const BackwardParams<T, Index>& params;
  const Group& group;
  const Task& task;
  int64_t first;

  DCGNN_DEVICE int64_t num_clusters() const {
    return kClusters == 0 ? params.num_clusters : kClusters;
  }
  DCGNN_DEVICE bool holds(int j) const { return kClusters > 0 || first + j < num_clusters(); }

  DCGNN_DEVICE int entry(int turn, int b) const { return (turn + b) * task.step; }

  // Of cluster `first` for the task's entry i, in assign and grad_assign.
  DCGNN_DEVICE int64_t weight_index(int i) const {
    return (task.begin + i) * num_clusters() + first;
  }

  DCGNN_DEVICE void load_clusters(int64_t channel, Row* clusters) const {
    const T* address =
        params.clusters + (task.segment * num_clusters() + first) * params.channels + channel;
    const bool valid = task.segment >= 0 && channel < params.channels;
#pragma unroll
    for (int j = 0; j < kTile; ++j) {
      clusters[j] = Row::zero();
      if (valid && holds(j)) clusters[j] = Row::load(address + j * params.channels);
    }
  }

  // Rows of grad and their factors for kBatch entries; 0 beyond the end.
  DCGNN_DEVICE void load_batch(int turn, int64_t channel, Row* rows, A* factors) const {
    Index members[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = entry(turn, b);
      members[b] = i < task.count ? load_constant(params.member + task.begin + i) : Index(-1);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      rows[b] = Row::zero();
      factors[b] = A(0);
      if (members[b] < 0) continue;
      factors[b] =
          params.local_factor == nullptr ? A(1) : load_constant(params.local_factor + members[b]);
      if (channel < params.channels) {
        rows[b] = Row::load(params.grad + int64_t(members[b]) * params.channels + channel);
      }
    }
  }

  DCGNN_DEVICE void add_products(const Row* clusters, const Row* rows, A (*products)[kTile]) const {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
#pragma unroll
      for (int j = 0; j < kTile; ++j) {
#pragma unroll
        for (int v = 0; v < kVector; ++v) products[b][j] += clusters[j][v] * rows[b][v];
      }
    }
  }

  DCGNN_DEVICE void add_rows(int turn, const Row* rows, const A* factors,
                             A (*sums)[kVector]) const {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = entry(turn, b);
#pragma unroll
      for (int j = 0; j < kTile; ++j) {
        A weight = A(0);
        if (i < task.count && holds(j)) {
          weight = factors[b] * widen(load_one(params.assign + weight_index(i) + j));
        }
#pragma unroll
        for (int v = 0; v < kVector; ++v) sums[j][v] += weight * rows[b][v];
      }
    }
  }

  // Adds products over the lanes of every group and writes them. The first two exchanges halve the
  // entries that a lane keeps, so that each quarter of a group ends with one entry of the batch:
  // fewer shuffles than four sums, and neighbouring results are written together.
  DCGNN_DEVICE void reduce_batch(int turn, const A* factors, A (*products)[kTile]) const {
    int offset = group.lanes / 2;
    const bool upper = (group.lane & offset) != 0;
    const bool odd = (group.lane & (offset / 2)) != 0;
    A pair[2][kTile], sums[kTile];
#pragma unroll
    for (int j = 0; j < kTile; ++j) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const A kept = upper ? products[b + 2][j] : products[b][j];
        const A sent = upper ? products[b][j] : products[b + 2][j];
        pair[b][j] = kept + __shfl_xor_sync(kAllLanes, sent, offset);
      }
      const A kept = odd ? pair[1][j] : pair[0][j];
      const A sent = odd ? pair[0][j] : pair[1][j];
      sums[j] = kept + __shfl_xor_sync(kAllLanes, sent, offset / 2);
    }
    for (offset /= 4; offset > 0; offset /= 2) {
#pragma unroll
      for (int j = 0; j < kTile; ++j) sums[j] += __shfl_xor_sync(kAllLanes, sums[j], offset);
    }
    const int b = (upper ? 2 : 0) + (odd ? 1 : 0);
    const int i = entry(turn, b);
    if (group.lane % (group.lanes / kBatch) != 0 || i >= task.count) return;
    const A lower_factor = odd ? factors[1] : factors[0],
            upper_factor = odd ? factors[3] : factors[2];
    const A factor = (upper ? upper_factor : lower_factor) * ego_factor(task.segment);
#pragma unroll
    for (int j = 0; j < kTile; ++j) {
      if (holds(j)) {
        params.grad_assign[weight_index(i) + j] = narrow<T>(factor * sums[j]);
      }
    }
  }

  DCGNN_DEVICE A ego_factor(int64_t ego) const {
    return params.ego_factor == nullptr ? A(1) : load_constant(params.ego_factor + ego);
  }

  DCGNN_DEVICE void store_sums(int64_t channel, A (*sums)[kVector]) const {
    if (task.shared) add_groups<kTile * kVector>(group, &sums[0][0]);
    if (!writes(group, task) || channel >= params.channels) return;
    const int64_t row = num_clusters() * params.channels;
    const A factor = ego_factor(task.segment);
#pragma unroll
    for (int j = 0; j < kTile; ++j) {
      if (!holds(j)) continue;
      const int64_t column = (first + j) * params.channels + channel;
      if (task.piece < 0) {
#pragma unroll
        for (int v = 0; v < kVector; ++v) sums[j][v] *= factor;
        Row::store(params.grad_clusters + task.segment * row + column, sums[j]);
      } else {
        store_partial<kVector>(params.partials + task.piece * row + column, sums[j]);
      }
    }
  }

  // The whole row in the registers of a group: one visit.
  DCGNN_DEVICE void visit_narrow() const {
    const int64_t channel = group.lane * kVector;
    Row clusters[kTile];
    load_clusters(channel, clusters);
    A sums[kTile][kVector] = {};
    for (int turn = 0; turn < task.turns; turn += kBatch) {
      Row rows[kBatch];
      A factors[kBatch], products[kBatch][kTile] = {};
      load_batch(turn, channel, rows, factors);
      add_products(clusters, rows, products);
      add_rows(turn, rows, factors, sums);
      reduce_batch(turn, factors, products);
    }
    store_sums(channel, sums);
  }

  DCGNN_DEVICE void visit_wide() const {
    const int64_t stride = group.lanes * kVector;
    Row clusters[kTile], rows[kBatch];
    A factors[kBatch];
    for (int turn = 0; turn < task.turns; turn += kBatch) {
      A products[kBatch][kTile] = {};
      for (int64_t begin = 0; begin < params.channels; begin += stride) {
        load_clusters(begin + group.lane * kVector, clusters);
        load_batch(turn, begin + group.lane * kVector, rows, factors);
        add_products(clusters, rows, products);
      }
      reduce_batch(turn, factors, products);
    }
    for (int64_t begin = 0; begin < params.channels; begin += stride) {
      A sums[kTile][kVector] = {};
      for (int turn = 0; turn < task.turns; turn += kBatch) {
        load_batch(turn, begin + group.lane * kVector, rows, factors);
        add_rows(turn, rows, factors, sums);
      }
      store_sums(begin + group.lane * kVector, sums);
    }
  }
};

// Blocks that must fit on a multiprocessor: the clusters and the sums of a tile stay in registers.
template <int kVector, int kClusters, bool kWide, class T>
constexpr int kBackwardBlocks =
    kClusters > 0 && !kWide &&
            kClusters * kVector * int(sizeof(Acc<T>)) <= (sizeof(T) == 8 ? 48 : 64)
        ? 2
        : 1;

// kClusters 0: any number of clusters, four at a time. kWide: rows longer than a warp can hold.
template <int kVector, int kClusters, bool kWide, class T, class Index>
__global__ void __launch_bounds__(kBlockThreads, kBackwardBlocks<kVector, kClusters, kWide, T>)
    cluster_scatter_backward_kernel(const BackwardParams<T, Index> params) {
  using Tile = ClusterTile<kVector, kClusters, T, Index>;
  const Group group(params.lanes);
  for_each_task(params.rowptr, params.num_egos, params.num_slots, group, [&](const Task& task) {
    for (int64_t first = 0; first < params.num_clusters; first += Tile::kTile) {
      const Tile tile{params, group, task, kClusters == 0 ? first : 0};
      if constexpr (kWide) {
        tile.visit_wide();
      } else {
        tile.visit_narrow();
      }
      if constexpr (kClusters > 0) break;
    }
  });
}

template <class T, class Index>
__global__ void __launch_bounds__(kBlockThreads, 2)
    cluster_scatter_backward_hubs_kernel(const BackwardParams<T, Index> params) {
  const int64_t row = params.num_clusters * params.channels;
  finish_hubs(params.rowptr, params.num_egos, params.num_slots, row, params.partials,
              [&](int64_t ego, int64_t column, Acc<T> sum) {
                const Acc<T> factor = params.ego_factor == nullptr
                                          ? Acc<T>(1)
                                          : load_constant(params.ego_factor + ego);
                params.grad_clusters[ego * row + column] = narrow<T>(factor * sum);
              });
}

}  // namespace dcgnn::cuda
