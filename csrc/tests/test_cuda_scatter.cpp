// The CUDA kernels of the broadcast, run on the host: the bodies that nvcc compiles and the choice
// of kernel and grid, with the address and undefined-behaviour sanitizers, many thread orders, and
// results against double loops. DCGNN_TEST_TYPE, DCGNN_TEST_INDEX: the storage and index types.
// With the argument "quick": fewer cases.
#include "tests/cuda_host.h"
// The order matters: the kernels need CUDA's words.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "cuda/instances.cuh"
#include "tests/cuda_naive.h"

#define CHECK(condition, ...)                                              \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                   \
      std::fprintf(stderr, "\n");                                          \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

namespace dcgnn::cuda {
using TestType = DCGNN_TEST_TYPE;
}

namespace dcgnn::test {
namespace {

using Storage = cuda::TestType;
using Index = DCGNN_TEST_INDEX;
using Wide = cuda::Acc<Storage>;

// Runs each kernel at once, its threads and blocks in an order drawn from the seed.
struct HostLauncher {
  unsigned seed;

  template <class Kernel, class Params>
  void operator()(Kernel kernel, int64_t blocks, const Params& params) const {
    cuda_host::launch(
        unsigned(blocks), unsigned(cuda::kBlockThreads), [&] { kernel(params); }, seed);
  }
};

struct Case {
  int64_t num_clusters, channels, num_global;
  bool update;
  cuda::Activation activation;
  int64_t misaligned;  // elements by which every array begins late
};

// An array of the kernels, `offset` elements into an allocation of exactly the needed size.
template <class T>
struct Array {
  std::vector<T> storage;
  int64_t offset, count;

  Array(const std::vector<T>& values, int64_t offset_)
      : storage(offset_), offset(offset_), count(int64_t(values.size())) {
    storage.insert(storage.end(), values.begin(), values.end());
    storage.shrink_to_fit();
  }
  T* data() { return storage.data() + offset; }
  std::vector<double> doubles() { return as_double(data(), count); }
};

template <class T>
Array<T> not_a_number(int64_t count, int64_t offset) {
  const auto nan = cuda::narrow<T>(std::numeric_limits<cuda::Acc<T>>::quiet_NaN());
  return Array<T>(std::vector<T>(count, nan), offset);
}

void compare(const char* what, const Case& test, std::vector<double> result,
             const std::vector<Sum>& expected) {
  CHECK(result.size() == expected.size(), "%s", what);
  for (size_t i = 0; i < result.size(); ++i) {
    double value = expected[i].value;
    if (test.activation == cuda::Activation::kTanh) value = std::tanh(value);
    if (test.activation == cuda::Activation::kRelu) value = std::max(value, 0.0);
    // Rounding of storage once, of sums some times; the smallest float16 is 2^-24.
    const double bound = 2 * kRounding<Storage> * std::abs(value) + 0x1p-24 +
                         64 * (sizeof(Wide) == 8 ? 0x1p-53 : 0x1p-24) * expected[i].magnitude;
    CHECK(std::abs(result[i] - value) <= (sizeof(Wide) == 8 ? bound - 0x1p-24 + 1e-15 : bound),
          "%s[%zu] = %.17g, wanted %.17g (K=%ld F=%ld)", what, i, result[i], value,
          long(test.num_clusters), long(test.channels));
  }
}

template <class T>
bool same_bits(Array<T>& left, Array<T>& right) {
  return left.count == 0 || std::memcmp(left.data(), right.data(), left.count * sizeof(T)) == 0;
}

void run_case(const TestGraph<Index>& graph, const Case& test, unsigned seed) {
  std::mt19937 random(seed);
  const int64_t nodes = graph.num_nodes(), slots = graph.num_slots(), late = test.misaligned;
  const int64_t dense = test.update ? nodes : 0;
  const auto values = [&](int64_t count) {
    return Array<Storage>(random_values<Storage>(count, random), late);
  };
  const auto factors = [&] { return Array<Wide>(random_values<Wide>(dense, random), 0); };
  Array<Storage> assign = values(slots * test.num_clusters);
  Array<Storage> clusters = values(nodes * test.num_clusters * test.channels);
  Array<Storage> x = values(dense * test.channels);
  Array<Storage> global_assign = values(dense * test.num_global);
  Array<Storage> global_message = values(test.update ? test.num_global * test.channels : 0);
  Array<Storage> grad = values(nodes * test.channels);
  Array<Wide> ego_factor = factors(), x_factor = factors();
  Array<Wide> global_factor = factors(), local_factor = factors();
  cuda::NodeUpdate update;
  if (test.update) {
    update = {test.num_global,   x.data(),        global_assign.data(), global_message.data(),
              ego_factor.data(), x_factor.data(), global_factor.data(), local_factor.data(),
              test.activation};
  }
  const NaiveCall naive{test.num_clusters,       test.channels,
                        test.num_global,         assign.doubles(),
                        clusters.doubles(),      x.doubles(),
                        global_assign.doubles(), global_message.doubles(),
                        grad.doubles(),          ego_factor.doubles(),
                        x_factor.doubles(),      global_factor.doubles(),
                        local_factor.doubles()};

  const auto forward = [&](int64_t max_blocks, unsigned order) {
    Array<Storage> out = not_a_number<Storage>(nodes * test.channels, late);
    cuda::ScatterForward call{kDType<Storage>, graph.view(),  test.num_clusters,
                              test.channels,   assign.data(), clusters.data(),
                              update,          out.data(),    nullptr};
    auto workspace =
        not_a_number<Wide>(cuda::forward_workspace_bytes(call) / int64_t{sizeof(Wide)}, 0);
    call.workspace = workspace.data();
    cuda::run_forward<Storage, Index>(call, max_blocks, HostLauncher{order});
    return out;
  };
  Array<Storage> out = forward(64, 0), again = forward(2, seed + 1);
  CHECK(same_bits(out, again), "forward depends on the order of threads or on the grid");
  compare("out", test, out.doubles(), naive_forward(graph, naive));

  const auto backward = [&](int64_t max_blocks, unsigned order) {
    auto grads = std::pair(not_a_number<Storage>(slots * test.num_clusters, late),
                           not_a_number<Storage>(nodes * test.num_clusters * test.channels, late));
    cuda::ScatterBackward call{kDType<Storage>,     graph.view(), test.num_clusters,
                               test.channels,       grad.data(),  assign.data(),
                               clusters.data(),     update,       grads.first.data(),
                               grads.second.data(), nullptr};
    auto workspace =
        not_a_number<Wide>(cuda::backward_workspace_bytes(call) / int64_t{sizeof(Wide)}, 0);
    call.workspace = workspace.data();
    cuda::run_backward<Storage, Index>(call, max_blocks, HostLauncher{order});
    return grads;
  };
  auto grads = backward(64, 0), grads_again = backward(3, seed + 2);
  CHECK(same_bits(grads.first, grads_again.first) && same_bits(grads.second, grads_again.second),
        "backward depends on the order of threads or on the grid");
  std::vector<Sum> grad_assign, grad_clusters;
  naive_backward(graph, naive, grad_assign, grad_clusters);
  Case linear = test;
  linear.activation = cuda::Activation::kNone;
  compare("grad_assign", linear, grads.first.doubles(), grad_assign);
  compare("grad_clusters", linear, grads.second.doubles(), grad_clusters);
}

}  // namespace
}  // namespace dcgnn::test

int main(int argc, char** argv) {
  using namespace dcgnn;
  using cuda::Activation;
  const bool quick = argc > 1 && std::strcmp(argv[1], "quick") == 0;
  constexpr int64_t kVector = cuda::kFullVector<test::Storage>;
  const test::TestGraph<test::Index> empty({}), lonely(test::random_egos(1, -1, -1, 0, 1));
  const test::TestGraph<test::Index> light(test::random_egos(23, -1, -1, 0, 2));
  const test::TestGraph<test::Index> medium(test::random_egos(60, 3, 7, 40, 3));
  // The first hub begins inside a chunk; the second is just longer than a chunk.
  const test::TestGraph<test::Index> hubs(test::random_egos(200, 100, 101, 129, 4));
  constexpr unsigned kFirstSeed = 10;
  unsigned seed = kFirstSeed;
  const auto run = [&](const auto& graph, test::Case test) { test::run_case(graph, test, ++seed); };

  run(light, {2, 4 * kVector, 3, true, Activation::kTanh, 0});
  run(light, {2, kVector + 1, 1, true, Activation::kRelu, 0});
  run(light, {2, 36 * kVector, 0, false, Activation::kNone, 0});
  run(light, {3, 2 * kVector, 0, false, Activation::kNone, 1});
  run(medium, {5, 5 * kVector, 0, false, Activation::kNone, 0});
  run(hubs, {2, 3 * kVector, 3, true, Activation::kTanh, 0});
  if (!quick) {
    for (const auto* graph : {&empty, &lonely, &light}) {
      run(*graph, {2, 4 * kVector, 3, true, Activation::kTanh, 0});
      run(*graph, {2, 0, 1, true, Activation::kNone, 0});
      run(*graph, {0, kVector, 2, true, Activation::kRelu, 0});
    }
    for (int64_t num_clusters : {1, 3, 4, 6}) {
      run(medium, {num_clusters, 5 * kVector, 0, false, Activation::kNone, 0});
    }
    // Narrower and wider than a vector, a group and a warp; with and without room for vectors.
    for (int64_t channels : {int64_t{1}, int64_t{3}, 32 * kVector, 36 * kVector}) {
      run(light, {2, channels, 1, true, Activation::kNone, 0});
      run(light, {2, channels, 0, false, Activation::kNone, 1});
    }
    run(hubs, {5, 2 * kVector, 0, false, Activation::kNone, 1});
    run(hubs, {2, 33 * kVector, 0, false, Activation::kNone, 0});
    // A hub of more chunks than a block has warps: in the second stage a warp adds several pieces.
    const test::TestGraph<test::Index> large(test::random_egos(1200, 5, 700, 260, 5));
    run(large, {1, kVector, 1, true, Activation::kTanh, 0});
  }
  std::printf("%u cases agree with double loops, in several thread orders\n", seed - kFirstSeed);
  return 0;
}
