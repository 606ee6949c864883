// What the CUDA kernels take and give: plain device pointers and sizes, no torch, no CUDA headers.
//
// Words: an *ego* is a node with its neighbourhood; a *slot* is one membership "node u in ego i";
// *assign* is the transport plan P, *clusters* are the cluster-nodes C of every ego.
#pragma once

#include <cstdint>

namespace dcgnn::cuda {

enum class DType { kFloat32, kFloat64, kFloat16, kBFloat16 };
enum class Activation : int { kNone, kRelu, kTanh };

// CSR of the egos and its transpose; the five arrays are int32_t, or int64_t when wide_index.
// Every node has an ego, except where whole graphs of a batch are the egos.
struct Graph {
  int64_t num_egos;
  int64_t num_nodes;
  int64_t num_slots;
  bool wide_index;
  const void* rowptr;
  const void* member;
  const void* colptr;
  const void* ego;
  const void* slot;
};

// The dense part of a node update. x null: the plain broadcast. A factor that is null counts 1;
// the backward reads only ego_factor and local_factor. Factors are float, or double for float64.
struct NodeUpdate {
  int64_t num_global = 0;
  const void* x = nullptr;               // [N, F]
  const void* global_assign = nullptr;   // [N, Omega]
  const void* global_message = nullptr;  // [Omega, F]
  const void* ego_factor = nullptr;
  const void* x_factor = nullptr;
  const void* global_factor = nullptr;
  const void* local_factor = nullptr;
  Activation activation = Activation::kNone;
};

struct ScatterForward {
  DType dtype;
  Graph graph;
  int64_t num_clusters;
  int64_t channels;
  const void* assign;    // [S, K]
  const void* clusters;  // [egos, K, F]
  NodeUpdate update;
  void* out;        // [N, F]
  void* workspace;  // forward_workspace_bytes(*this)
};

struct ScatterBackward {
  DType dtype;
  Graph graph;
  int64_t num_clusters;
  int64_t channels;
  const void* grad;  // [N, F]
  const void* assign;
  const void* clusters;
  NodeUpdate update;
  void* grad_assign;    // [S, K]
  void* grad_clusters;  // [N, K, F]
  void* workspace;      // backward_workspace_bytes(*this)
};

// A hub is a node with more than this many entries. Hubs are cut at multiples of it, so that the
// cuts depend on the graph alone and an entry range of this length meets at most two hubs.
constexpr int64_t kHubEntries = 128;

// Without more entries than kHubEntries there is no hub, hence no chunk.
inline int64_t num_chunks(int64_t num_slots) {
  return num_slots <= kHubEntries ? 0 : (num_slots + kHubEntries - 1) / kHubEntries;
}

// Every chunk may hold the end of one hub and the beginning of another: two rows of partial sums.
inline int64_t workspace_bytes(DType dtype, int64_t num_slots, int64_t row) {
  return 2 * num_chunks(num_slots) * row * (dtype == DType::kFloat64 ? 8 : 4);
}
inline int64_t forward_workspace_bytes(const ScatterForward& call) {
  return workspace_bytes(call.dtype, call.graph.num_slots, call.channels);
}
inline int64_t backward_workspace_bytes(const ScatterBackward& call) {
  return workspace_bytes(call.dtype, call.graph.num_slots, call.num_clusters * call.channels);
}

}  // namespace dcgnn::cuda
