// What the CPU kernels take and give: plain pointers and sizes, no torch.
//
// Words: an *ego* is a node with its neighbourhood; a *slot* is one membership "node u in ego i";
// *assign* is the transport plan P, *centroids* the cluster-nodes that costs are measured to,
// *clusters* the weighted means that come out, *potentials* the history of g, the column potentials
// of Sinkhorn.
#pragma once

#include <cstdint>
#include <type_traits>

namespace dcgnn::cpu {

enum class DType { kFloat32, kFloat64, kBFloat16 };
enum class CostScale { kNone, kMean, kMax };

// Storage of one bfloat16; arithmetic happens in float.
struct BFloat16 {
  uint16_t bits;
};

// A non-owning reference to a callable body(begin, end); the callable outlives every use here.
class RangeBody {
 public:
  template <class Body, class = std::enable_if_t<!std::is_same_v<std::decay_t<Body>, RangeBody>>>
  RangeBody(const Body& body)  // NOLINT: implicit on purpose, so that a lambda can be passed
      : body_(&body), call_([](const void* self, int64_t begin, int64_t end) {
          (*static_cast<const Body*>(self))(begin, end);
        }) {}
  void operator()(int64_t begin, int64_t end) const { call_(body_, begin, end); }

 private:
  const void* body_;
  void (*call_)(const void*, int64_t, int64_t);
};

// Where a kernel gets its threads from. run() calls body on disjoint ranges that cover
// [0, num_tasks) and returns when all are done. Results never depend on how ranges are cut.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual void run(int64_t num_tasks, RangeBody body) const = 0;
};

// Everything in the calling thread: inside a task, and for tests.
class SerialExecutor final : public Executor {
 public:
  void run(int64_t num_tasks, RangeBody body) const override {
    if (num_tasks > 0) body(0, num_tasks);
  }
};

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

struct Transport {
  int64_t num_clusters;  // K, or Omega
  int64_t channels;      // F
  double lam;
  int64_t num_iters;  // T; 0: to convergence
  CostScale cost_scale;
  double tol;         // only to convergence
  int64_t max_iters;  // only to convergence
};

// What a backward keeps for the gather that makes grad_z: numbers (float, or double for float64),
// 2 K for every slot or, at K = 2, two for every slot and then one for every problem; and so many
// rows of the storage type for every problem. The global problem needs none unless K = 2.
constexpr int64_t kPairRows = 3;
__attribute__((always_inline)) inline int64_t num_coefficients(const Transport& transport,
                                                               bool is_global, int64_t num_slots,
                                                               int64_t num_problems) {
  if (transport.num_clusters == 2) return 2 * num_slots + num_problems;
  return is_global ? 0 : 2 * transport.num_clusters * num_slots;
}
__attribute__((always_inline)) inline int64_t table_rows(const Transport& transport) {
  return transport.num_clusters == 2 ? kPairRows : 0;
}
// How many problems a backward should take at a time: a large table is made, and gathered from, in
// two parts, so that it takes half the memory.
constexpr int64_t kWholeTableBytes = int64_t{1} << 26;
__attribute__((always_inline)) inline int64_t table_problems(const Transport& transport,
                                                             int64_t num_problems,
                                                             int64_t bytes_per_number) {
  const int64_t rows = num_problems * table_rows(transport);
  if (rows * transport.channels * bytes_per_number <= kWholeTableBytes) return num_problems;
  return (num_problems + 1) / 2;
}

// For the global problem graph is null and there is one problem with num_nodes rows. Without
// centroids the egos start fresh (K = 2 only): at the node itself and the mean of its neighbours.
// Returns false when a cost is not finite; the outputs are then meaningless.
struct SinkhornForward {
  Transport transport;
  DType dtype;
  const Graph* graph;
  int64_t num_nodes;
  const void* z;          // [N, F]
  const void* centroids;  // [egos, K, F], global [Omega, F]; or null
  void* assign;           // [S, K], global [N, Omega]
  void* clusters;         // [egos, K, F], global [Omega, F]
  void* potentials;       // [egos, T, K], global [T, Omega]; float, or double for float64
};

struct SinkhornBackward {
  Transport transport;
  DType dtype;
  const Graph* graph;
  int64_t num_nodes;
  const void* grad_assign;    // like assign, or null
  const void* grad_clusters;  // like clusters, or null
  const void* z;
  const void* centroids;
  const void* potentials;
  void* coefficients;      // scratch: num_coefficients() numbers
  void* table;             // scratch: [table_problems, table_rows(), F]
  int64_t table_problems;  // at least 1; global 1
  void* grad_z;
  void* grad_centroids;  // null where centroids is
};

enum class Activation { kNone, kRelu, kTanh };

// The dense part of a node update; all pointers null: the plain broadcast.
struct NodeUpdate {
  int64_t num_global;
  const void* x;               // [N, F]
  const void* global_assign;   // [N, Omega]
  const void* global_message;  // [Omega, F]
  // Factors, float or double for float64: w of every ego; a, b, c of every node.
  const void* ego_factor;
  const void* x_factor;
  const void* global_factor;
  const void* local_factor;
  Activation activation;  // of the whole sum
};

// out_i = activation(a_i x_i + b_i sum_j P^Omega_ij M^Omega_j + c_i sum_{egos u of i} w_u sum_j
// P^u_ij C^u_j). The backward starts at the gradient of the sum.
struct ScatterForward {
  DType dtype;
  const Graph* graph;
  int64_t num_clusters;
  int64_t channels;
  const void* assign;
  const void* clusters;
  NodeUpdate update;
  void* out;  // [N, F]
};

// The gradients of the dense part are null for the plain broadcast.
struct ScatterBackward {
  DType dtype;
  const Graph* graph;
  int64_t num_clusters;
  int64_t channels;
  const void* grad;  // [N, F]
  const void* assign;
  const void* clusters;
  NodeUpdate update;
  void* grad_assign;
  void* grad_clusters;
  void* grad_x;
  void* grad_global_assign;
  void* grad_global_message;
};

struct CentroidsForward {
  DType dtype;
  const Graph* graph;
  int64_t num_clusters;
  int64_t channels;
  const void* z;    // [N, F]
  void* centroids;  // [N, K, F]
};

struct CentroidsBackward {
  DType dtype;
  const Graph* graph;
  int64_t num_clusters;
  int64_t channels;
  const void* grad;  // [N, K, F]
  void* grad_z;      // [N, F]
};

// out = x weight^T + bias; weight[o][k] is at o * weight_strides[0] + k * weight_strides[1].
struct LinearForward {
  DType dtype;
  int64_t rows;
  int64_t inputs;
  int64_t outputs;
  const void* x;       // [rows, inputs]
  const void* weight;  // [outputs, inputs]
  int64_t weight_strides[2];
  const void* bias;  // [outputs], or null
  void* out;         // [rows, outputs]
};

// out[a][b] = sum_n left[n][a] right[n][b].
struct OuterProducts {
  DType dtype;
  int64_t rows;
  int64_t lefts;
  int64_t rights;
  const void* left;   // [rows, lefts]
  const void* right;  // [rows, rights]
  void* out;          // [lefts, rights]
};

// The kernels of one instruction set.
struct KernelTable {
  const char* isa;
  bool (*local_sinkhorn)(const SinkhornForward&, const Executor&);
  void (*local_sinkhorn_backward)(const SinkhornBackward&, const Executor&);
  bool (*global_sinkhorn)(const SinkhornForward&, const Executor&);
  void (*global_sinkhorn_backward)(const SinkhornBackward&, const Executor&);
  void (*cluster_scatter)(const ScatterForward&, const Executor&);
  void (*cluster_scatter_backward)(const ScatterBackward&, const Executor&);
  void (*local_centroids)(const CentroidsForward&, const Executor&);
  void (*local_centroids_backward)(const CentroidsBackward&, const Executor&);
  void (*linear)(const LinearForward&, const Executor&);
  void (*outer_products)(const OuterProducts&, const Executor&);
};

// Outputs of so many bytes and more pass the caches by; tests lower it.
int64_t& streamed_bytes();

// Where kernels take working memory of kLargeBuffer bytes and more from, aligned to 64 bytes: at
// first fresh each time; the bindings keep it between calls, since the first touch of a page is
// dear.
constexpr int64_t kLargeBuffer = int64_t{1} << 21;
struct WorkingMemory {
  void* (*take)(int64_t bytes, void** handle);
  void (*give_back)(void* handle);
};
WorkingMemory& working_memory();

// The best table that this processor can run; the environment variable DCGNN_CPU_ISA
// (baseline, avx2, avx512) asks for a lower one. Chosen once.
const KernelTable& kernels();

}  // namespace dcgnn::cpu
