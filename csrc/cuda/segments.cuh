// How the entries of a CSR array (all egos of a node, or all members of an ego) are cut into work.
//
// One row of F channels is read by a group of 4 to 32 lanes; a warp holds 32 / lanes groups.
//   light segments  (<= kLightEntries): one group each, several in a warp
//   medium segments (<= kHubEntries):   one warp each, its groups take turns over the entries
//   hubs:                               cut at multiples of kHubEntries; one warp sums a piece into
//                                       a workspace, a second launch adds the pieces in order
// The cuts depend on the graph, F and the vector width alone, sums run in a fixed order and nothing
// is atomic: the same bits in every run. Every loop around a shuffle has the same number of turns
// in all lanes of a warp.
#pragma once

#include "numeric.cuh"
#include "types.h"

namespace dcgnn::cuda {

constexpr int kWarpLanes = 32;
constexpr int kBlockWarps = 8;
constexpr int kBlockThreads = kBlockWarps * kWarpLanes;
constexpr int kMinimumLanes = 4;
constexpr int kLightEntries = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// A power of two: lanes that together read one row, or as much of it as a warp can.
inline int lanes_for_row(int64_t channels, int vector) {
  int lanes = kMinimumLanes;
  while (lanes < kWarpLanes && lanes * int64_t{vector} < channels) lanes *= 2;
  return lanes;
}

// Where this thread stands in its warp.
struct Group {
  int lanes;
  int count;
  int index;
  int lane;

  explicit DCGNN_DEVICE Group(int lanes_) : lanes(lanes_), count(kWarpLanes / lanes_) {
    const int warp_lane = int(threadIdx.x) % kWarpLanes;
    index = warp_lane / lanes;
    lane = warp_lane % lanes;
  }
};

// The entries 0, step, 2 step, ... below count of one segment, counted from `begin`, for one group.
// A task is never longer than kHubEntries, so that positions within it are plain ints.
struct Task {
  int64_t segment;  // -1: nothing for this group
  int64_t begin;
  int64_t piece;  // of a hub: the row of the workspace for the partial sum; else -1
  int count;
  int step;
  int turns;    // the most entries that a group of the warp has, or more
  bool shared;  // all groups of the warp work on this segment: their sums must be added
};

// The segment that holds an entry: the last i with pointers[i] <= entry.
template <class Index>
DCGNN_DEVICE int64_t segment_of(const Index* pointers, int64_t num_segments, int64_t entry) {
  int64_t low = 0, high = num_segments;
  while (low + 1 < high) {
    const int64_t middle = (low + high) / 2;
    if (int64_t(load_constant(pointers + middle)) <= entry) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

DCGNN_DEVICE int warp_maximum(int value) {
  for (int offset = kWarpLanes / 2; offset > 0; offset /= 2) {
    const int other = __shfl_xor_sync(kAllLanes, value, offset);
    value = other > value ? other : value;
  }
  return value;
}

// Adds up what the groups of a warp hold; afterwards all groups hold the sum.
template <int kCount, class A>
DCGNN_DEVICE void add_groups(const Group& group, A* sums) {
  for (int offset = group.lanes; offset < kWarpLanes; offset *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] += __shfl_xor_sync(kAllLanes, sums[i], offset);
  }
}

// Whether this group writes the sum of its task.
DCGNN_DEVICE bool writes(const Group& group, const Task& task) {
  return task.segment >= 0 && !(task.shared && group.index > 0);
}

template <int kCount, class A>
DCGNN_DEVICE void store_partial(A* address, const A* sums) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) address[i] = sums[i];
}

// All groups of the warp on the entries [begin, end) of one segment.
DCGNN_DEVICE Task shared_task(const Group& group, int64_t segment, int64_t begin, int64_t end,
                              int64_t piece) {
  const int count = int(end - begin), turns = (count + group.count - 1) / group.count;
  return {segment, begin + group.index, piece, count - group.index, group.count, turns, true};
}

// Calls body(task) for every task of this warp. The body is called by all lanes of a warp, which
// may hold different segments (see Task::shared).
template <class Index, class Body>
DCGNN_DEVICE void for_each_task(const Index* pointers, int64_t num_segments, int64_t num_slots,
                                const Group& group, const Body& body) {
  const int64_t chunks = num_slots <= kHubEntries ? 0 : (num_slots - 1) / kHubEntries + 1;
  const int64_t tiles = (num_segments + group.count - 1) / group.count;
  const int64_t num_warps = int64_t(gridDim.x) * kBlockWarps;
  // One group a warp: light and medium are the same.
  const int light = group.count == 1 ? int(kHubEntries) : kLightEntries;
  const auto pointer = [&](int64_t i) { return int64_t(load_constant(pointers + i)); };

  // Chunks come first: hubs take longest.
  for (int64_t item = int64_t(blockIdx.x) * kBlockWarps + int(threadIdx.x) / kWarpLanes;
       item < chunks + tiles; item += num_warps) {
    const bool is_chunk = item < chunks;
    const int64_t tile = (item - chunks) * group.count;
    int num_tasks = 2;
    Task task;
    if (!is_chunk) {
      const int64_t own = tile + group.index;
      int64_t begin = 0, length = 0;
      if (own < num_segments) {
        begin = pointer(own);
        length = pointer(own + 1) - begin;
      }
      const bool is_light = own < num_segments && length <= light;
      const int longest = warp_maximum(length > light ? light + 1 : int(length));
      task = {is_light ? own : -1, begin, -1, is_light ? int(length) : 0, 1, longest, false};
      num_tasks = longest > light && group.count > 1 ? 1 + group.count : 1;
    }
    for (int i = 0; i < num_tasks; ++i) {
      if (is_chunk) {
        const int64_t begin = item * kHubEntries;
        const int64_t end = begin + kHubEntries < num_slots ? begin + kHubEntries : num_slots;
        const int64_t hub = segment_of(pointers, num_segments, i == 0 ? begin : end - 1);
        const int64_t hub_begin = pointer(hub), hub_end = pointer(hub + 1);
        if (hub_end - hub_begin <= kHubEntries || (i == 1 && hub_begin <= begin)) continue;
        task = shared_task(group, hub, hub_begin > begin ? hub_begin : begin,
                           hub_end < end ? hub_end : end, 2 * item + i);
      } else if (i > 0) {
        const int64_t segment = tile + i - 1;
        if (segment >= num_segments) break;
        const int64_t begin = pointer(segment), end = pointer(segment + 1);
        if (end - begin <= light || end - begin > kHubEntries) continue;
        task = shared_task(group, segment, begin, end, -1);
      }
      body(task);
    }
  }
}

// The second stage: adds the partial rows of every hub in the order of its pieces, and calls
// store(hub, channel, sum). A block for each hub; a warp takes every kBlockWarps-th piece.
template <class A, class Index, class Store>
DCGNN_DEVICE void finish_hubs(const Index* pointers, int64_t num_segments, int64_t num_slots,
                              int64_t row, const A* partials, const Store& store) {
  __shared__ A sums[kBlockWarps][kWarpLanes];
  const int warp = int(threadIdx.x) / kWarpLanes, lane = int(threadIdx.x) % kWarpLanes;
  const int64_t chunks = (num_slots - 1) / kHubEntries + 1;
  for (int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const int64_t begin = chunk * kHubEntries;
    const int64_t end = begin + kHubEntries < num_slots ? begin + kHubEntries : num_slots;
    // A hub is longer than a chunk: the one that begins here, if any, holds the chunk's last entry.
    const int64_t hub = segment_of(pointers, num_segments, end - 1);
    const int64_t hub_begin = load_constant(pointers + hub);
    const int64_t hub_end = load_constant(pointers + hub + 1);
    if (hub_begin < begin || hub_end - hub_begin <= kHubEntries) continue;
    const int64_t last_chunk = (hub_end - 1) / kHubEntries;
    for (int64_t first = 0; first < row; first += kWarpLanes) {
      const int64_t channel = first + lane;
      A sum = 0;
      if (channel < row) {
        for (int64_t i = chunk + warp; i <= last_chunk; i += kBlockWarps) {
          // Only where the hub begins inside its first chunk is its piece the second one there.
          const int64_t which = i == chunk && hub_begin > begin ? 1 : 0;
          sum += partials[(2 * i + which) * row + channel];
        }
      }
      sums[warp][lane] = sum;
      __syncthreads();
      if (warp == 0 && channel < row) {
        A total = 0;
        for (int i = 0; i < kBlockWarps; ++i) total += sums[i][lane];
        store(hub, channel, total);
      }
      __syncthreads();
    }
  }
}

}  // namespace dcgnn::cuda
