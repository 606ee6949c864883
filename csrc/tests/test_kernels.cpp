// Every kernel against naive double loops, on a graph with isolated nodes, directed edges and a hub
// that is split over threads; and the same bits for one, two and five threads. The instruction set
// is that of kernels(): CTest runs this program once for each, by DCGNN_CPU_ISA.
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <string>

#include "cpu/ego_graph.h"
#include "tests/check.h"
#include "tests/naive.h"

namespace dcgnn::test {
namespace {

using cpu::BFloat16;
using cpu::CostScale;
using cpu::DType;

template <class T>
struct Storage;
template <>
struct Storage<float> {
  static constexpr DType kType = DType::kFloat32;
  static constexpr double kTolerance = 2e-4;
  static float narrow(double x) { return static_cast<float>(x); }
  static double widen(float x) { return x; }
};
template <>
struct Storage<double> {
  static constexpr DType kType = DType::kFloat64;
  static constexpr double kTolerance = 1e-9;
  static double narrow(double x) { return x; }
  static double widen(double x) { return x; }
};
template <>
struct Storage<BFloat16> {
  static constexpr DType kType = DType::kBFloat16;
  static constexpr double kTolerance = 3e-2;
  static BFloat16 narrow(double x) {
    const float value = static_cast<float>(x);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return {static_cast<uint16_t>((bits + 0x8000) >> 16)};
  }
  static double widen(BFloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
};
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

struct Serially {
  template <class Body>
  void operator()(int64_t count, const Body& body) const {
    for (int64_t i = 0; i < count; ++i) body(i);
  }
};

template <class Index>
struct TestGraph {
  std::vector<Index> rowptr, member, colptr, ego, slot;
  int64_t num_nodes, num_slots;
  TestGraph(int64_t nodes, int64_t edges, int64_t hub_edges, std::mt19937_64& random)
      : num_nodes(nodes) {
    std::vector<int64_t> source, target;
    const int64_t half = nodes / 2 + 1;  // the other half meets only the hub: small egos
    for (int64_t e = 0; e < edges; ++e) {
      source.push_back(static_cast<int64_t>(random() % half));
      target.push_back(static_cast<int64_t>(random() % half));
    }
    for (int64_t e = 0; e < hub_edges; ++e) {  // a hub as an ego, and as a member of many egos
      source.push_back(e % nodes);
      target.push_back(0);
      source.push_back(1 % nodes);
      target.push_back(e % nodes);
    }
    const Serially serially;
    const cpu::EgoGraphBuilder<Index, Serially> builder(
        source.data(), target.data(), static_cast<int64_t>(source.size()), nodes, 1, serially);
    num_slots = builder.num_slots();
    rowptr.resize(nodes + 1);
    colptr.resize(nodes + 1);
    member.resize(num_slots);
    ego.resize(num_slots);
    slot.resize(num_slots);
    builder.write(rowptr.data(), member.data(), colptr.data(), ego.data(), slot.data());
  }
  cpu::Graph view() const {
    return {num_nodes,     num_nodes,     num_slots,  sizeof(Index) == 8, rowptr.data(),
            member.data(), colptr.data(), ego.data(), slot.data()};
  }
};

template <class T>
std::vector<T> random_values(int64_t count, double spread, std::mt19937_64& random) {
  std::normal_distribution<double> normal(0, spread);
  std::vector<T> values(count);
  for (T& value : values) value = Storage<T>::narrow(normal(random));
  return values;
}

template <class T>
Doubles widen(const T* values, int64_t count) {
  Doubles wide(count);
  for (int64_t i = 0; i < count; ++i) wide[i] = Storage<T>::widen(values[i]);
  return wide;
}

template <class T>
void check_close(const T* values, const Doubles& expected, double tolerance,
                 const std::string& what) {
  double size = 0;
  for (const double x : expected) size = std::max(size, std::fabs(x));
  for (size_t i = 0; i < expected.size(); ++i) {
    const double error = std::fabs(Storage<T>::widen(values[i]) - expected[i]);
    if (!(error <= tolerance * (size + 2e-2))) {
      std::fprintf(stderr, "%s[%zu]: got %g, expected %g\n", what.c_str(), i,
                   Storage<T>::widen(values[i]), expected[i]);
      std::exit(1);
    }
  }
}

template <class Values>
bool same_bits(const Values& a, const Values& b) {
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
}

// Outputs begin at a cache line, as torch's do, so that they can be streamed.
template <class T>
struct LineAllocator {
  using value_type = T;
  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64)));
  }
  void deallocate(T* data, size_t) { ::operator delete(data, std::align_val_t(64)); }
  friend bool operator==(const LineAllocator&, const LineAllocator&) { return true; }
  friend bool operator!=(const LineAllocator&, const LineAllocator&) { return false; }
};
template <class T>
using Output = std::vector<T, LineAllocator<T>>;

// While it lives, every output that can be is streamed.
struct StreamAll {
  int64_t usual = cpu::streamed_bytes();
  StreamAll() { cpu::streamed_bytes() = 0; }
  ~StreamAll() { cpu::streamed_bytes() = usual; }
};

struct Case {
  int64_t clusters, channels, iters;
  double lam;
  CostScale cost_scale;
  // Terms of the size of lam cancel in a gradient, and a long run is not quite converged.
  double slack() const { return std::max(1., lam / 2) * (iters == 0 ? 10 : 1); }
  std::string name() const {
    return "K=" + std::to_string(clusters) + " F=" + std::to_string(channels) +
           " T=" + std::to_string(iters) + " scale=" + std::to_string(static_cast<int>(cost_scale));
  }
};

template <class T>
struct Results {
  Output<T> assign, clusters, grad_z, grad_centroids;
  std::vector<Wide<T>> potentials;
};

// Local when graph is given, else global over num_nodes rows. No centroids: a fresh start.
template <class T>
Results<T> run_sinkhorn(const Case& c, const cpu::Graph* graph, int64_t num_nodes,
                        const std::vector<T>& z, const std::vector<T>& centroids,
                        const std::vector<T>& grad_assign, const std::vector<T>& grad_clusters,
                        const cpu::Executor& executor, int64_t most_table_problems = 1 << 30) {
  const cpu::Transport transport{c.clusters, c.channels, c.lam, c.iters, c.cost_scale, 1e-12, 2000};
  const int64_t problems = graph == nullptr ? 1 : num_nodes;
  Results<T> out;
  out.assign.resize(grad_assign.size());
  out.clusters.resize(grad_clusters.size());
  out.grad_z.resize(z.size());
  out.grad_centroids.resize(centroids.size());
  out.potentials.resize(problems * std::max<int64_t>(c.iters, 1) * c.clusters);
  const auto& kernels = cpu::kernels();
  const cpu::SinkhornForward forward{transport,
                                     Storage<T>::kType,
                                     graph,
                                     num_nodes,
                                     z.data(),
                                     centroids.empty() ? nullptr : centroids.data(),
                                     out.assign.data(),
                                     out.clusters.data(),
                                     out.potentials.data()};
  CHECK((graph == nullptr ? kernels.global_sinkhorn : kernels.local_sinkhorn)(forward, executor));
  const int64_t slots = static_cast<int64_t>(grad_assign.size()) / c.clusters;
  std::vector<Wide<T>> coefficients(
      cpu::num_coefficients(transport, graph == nullptr, slots, problems));
  const int64_t table_problems = std::min(problems, most_table_problems);
  Output<T> table(table_problems * cpu::table_rows(transport) * c.channels);
  const cpu::SinkhornBackward backward{transport,
                                       Storage<T>::kType,
                                       graph,
                                       num_nodes,
                                       grad_assign.data(),
                                       grad_clusters.data(),
                                       z.data(),
                                       forward.centroids,
                                       out.potentials.data(),
                                       coefficients.data(),
                                       table.data(),
                                       table_problems,
                                       out.grad_z.data(),
                                       centroids.empty() ? nullptr : out.grad_centroids.data()};
  (graph == nullptr ? kernels.global_sinkhorn_backward : kernels.local_sinkhorn_backward)(backward,
                                                                                          executor);
  return out;
}

// Returns the gradient of the centroids.
template <class T>
Doubles check_problem(const Case& c, const Results<T>& got, int64_t problem, int64_t first_slot,
                      const Doubles& rows, const Doubles& centroids,
                      const std::vector<T>& grad_assign, const std::vector<T>& grad_clusters,
                      Doubles& grad_rows, double tolerance) {
  const int64_t n = static_cast<int64_t>(rows.size()) / c.channels, width = c.clusters * c.channels;
  constexpr int64_t kLongRun = 400;  // stands for "to convergence"
  NaiveProblem naive{n,          c.clusters,
                     c.channels, c.iters == 0 ? kLongRun : c.iters,
                     c.lam,      c.cost_scale,
                     rows,       centroids,
                     {},         {},
                     {},         {},
                     {},         {}};
  naive.forward();
  check_close(got.assign.data() + first_slot * c.clusters, naive.plan, tolerance,
              c.name() + " assign");
  check_close(got.clusters.data() + problem * width, naive.clusters, tolerance,
              c.name() + " clusters");
  Doubles grad_c;
  naive.backward(widen(grad_assign.data() + first_slot * c.clusters, n * c.clusters),
                 widen(grad_clusters.data() + problem * width, width), grad_rows, grad_c);
  if (!got.grad_centroids.empty()) {
    check_close(got.grad_centroids.data() + problem * width, grad_c, 10 * tolerance,
                c.name() + " grad_centroids");
  }
  return grad_c;
}

// Where an ego starts fresh: at its own row and the mean of the others, as weights of the rows.
Doubles fresh_weights(int64_t size, int64_t own) {
  Doubles weights(2 * size, 0);
  for (int64_t u = 0; u < size; ++u) {
    weights[u] = u == own ? 1 : 0;
    weights[size + u] = size == 1 ? 1 : (u == own ? 0 : 1 / static_cast<double>(size - 1));
  }
  return weights;
}

template <class T, class Index>
void check_local(const Case& c, const TestGraph<Index>& graph, bool fresh,
                 std::mt19937_64& random) {
  const cpu::Graph view = graph.view();
  const int64_t num_nodes = graph.num_nodes, width = c.clusters * c.channels;
  const double spread = 1 / std::sqrt(static_cast<double>(c.channels));
  const auto z = random_values<T>(num_nodes * c.channels, spread, random);
  const auto centroids = random_values<T>(fresh ? 0 : num_nodes * width, spread, random);
  const auto grad_assign = random_values<T>(graph.num_slots * c.clusters, 1, random);
  const auto grad_clusters = random_values<T>(num_nodes * width, 1, random);
  const auto got = run_sinkhorn<T>(c, &view, num_nodes, z, centroids, grad_assign, grad_clusters,
                                   cpu::SerialExecutor());
  const double tolerance = Storage<T>::kTolerance * c.slack();
  Doubles grad_z(z.size(), 0);
  for (int64_t ego = 0; ego < num_nodes; ++ego) {
    const int64_t begin = graph.rowptr[ego], end = graph.rowptr[ego + 1];
    Doubles rows, grad_rows((end - begin) * c.channels, 0);
    for (int64_t k = begin; k < end; ++k) {
      const Doubles row = widen(z.data() + graph.member[k] * c.channels, c.channels);
      rows.insert(rows.end(), row.begin(), row.end());
    }
    const int64_t size = end - begin;
    Doubles start, weights;
    if (fresh) {
      const auto own = std::find(graph.member.begin() + begin, graph.member.begin() + end, ego);
      weights = fresh_weights(size, own - graph.member.begin() - begin);
      start.assign(width, 0);
      for (int64_t e = 0; e < 2 * size; ++e) {
        for (int64_t d = 0; d < c.channels; ++d) {
          start[e / size * c.channels + d] += weights[e] * rows[e % size * c.channels + d];
        }
      }
    } else {
      start = widen(centroids.data() + ego * width, width);
    }
    const Doubles grad_start = check_problem(c, got, ego, begin, rows, start, grad_assign,
                                             grad_clusters, grad_rows, tolerance);
    for (int64_t e = 0; fresh && e < 2 * size; ++e) {
      for (int64_t d = 0; d < c.channels; ++d) {
        grad_rows[e % size * c.channels + d] += weights[e] * grad_start[e / size * c.channels + d];
      }
    }
    for (int64_t k = begin; k < end; ++k) {
      for (int64_t d = 0; d < c.channels; ++d) {
        grad_z[graph.member[k] * c.channels + d] += grad_rows[(k - begin) * c.channels + d];
      }
    }
  }
  check_close(got.grad_z.data(), grad_z, 10 * tolerance, c.name() + " grad_z");
  for (const int64_t threads : {2, 5}) {
    const auto again = run_sinkhorn<T>(c, &view, num_nodes, z, centroids, grad_assign,
                                       grad_clusters, ThreadExecutor(threads));
    CHECK(same_bits(got.assign, again.assign) && same_bits(got.clusters, again.clusters));
    CHECK(same_bits(got.grad_z, again.grad_z) &&
          same_bits(got.grad_centroids, again.grad_centroids));
  }
  {
    const StreamAll streamed;
    const auto again = run_sinkhorn<T>(c, &view, num_nodes, z, centroids, grad_assign,
                                       grad_clusters, ThreadExecutor(2));
    CHECK(same_bits(got.clusters, again.clusters) && same_bits(got.grad_z, again.grad_z));
  }
  for (const int64_t part : {num_nodes / 2 + 1, num_nodes / 5 + 1}) {  // the table's egos at a time
    const auto parts = run_sinkhorn<T>(c, &view, num_nodes, z, centroids, grad_assign,
                                       grad_clusters, ThreadExecutor(2), part);
    check_close(parts.grad_z.data(), grad_z, 10 * tolerance, c.name() + " grad_z in parts");
    CHECK(same_bits(got.grad_centroids, parts.grad_centroids));
  }
}

template <class T>
void check_global(const Case& c, int64_t num_nodes, std::mt19937_64& random) {
  const double spread = 1 / std::sqrt(static_cast<double>(c.channels));
  const auto z = random_values<T>(num_nodes * c.channels, spread, random);
  const auto centroids = random_values<T>(c.clusters * c.channels, spread, random);
  const auto grad_assign = random_values<T>(num_nodes * c.clusters, 1, random);
  const auto grad_clusters = random_values<T>(c.clusters * c.channels, 1, random);
  const auto got = run_sinkhorn<T>(c, nullptr, num_nodes, z, centroids, grad_assign, grad_clusters,
                                   cpu::SerialExecutor());
  Doubles grad_rows(z.size(), 0);
  const double tolerance = Storage<T>::kTolerance * c.slack();
  check_problem(c, got, 0, 0, widen(z.data(), static_cast<int64_t>(z.size())),
                widen(centroids.data(), static_cast<int64_t>(centroids.size())), grad_assign,
                grad_clusters, grad_rows, tolerance);
  check_close(got.grad_z.data(), grad_rows, 10 * tolerance, c.name() + " global grad_z");
  const auto again = run_sinkhorn<T>(c, nullptr, num_nodes, z, centroids, grad_assign,
                                     grad_clusters, ThreadExecutor(3));
  CHECK(same_bits(got.assign, again.assign) && same_bits(got.clusters, again.clusters));
  CHECK(same_bits(got.grad_z, again.grad_z) && same_bits(got.grad_centroids, again.grad_centroids));
}

template <class T, class Index>
void check_scatter(int64_t clusters, int64_t channels, const TestGraph<Index>& graph,
                   std::mt19937_64& random) {
  const cpu::Graph view = graph.view();
  const int64_t num_nodes = graph.num_nodes, width = clusters * channels;
  const auto assign = random_values<T>(graph.num_slots * clusters, 1, random);
  const auto centres = random_values<T>(num_nodes * width, 1, random);
  const auto grad = random_values<T>(num_nodes * channels, 1, random);
  Output<T> out(num_nodes * channels);
  std::vector<T> grad_assign(assign.size()), grad_centres(centres.size());
  Doubles want(out.size(), 0), want_assign(assign.size(), 0), want_centres(centres.size(), 0);
  for (int64_t ego = 0; ego < num_nodes; ++ego) {
    for (int64_t k = graph.rowptr[ego]; k < graph.rowptr[ego + 1]; ++k) {
      for (int64_t j = 0; j < clusters; ++j) {
        for (int64_t d = 0; d < channels; ++d) {
          const double p = Storage<T>::widen(assign[k * clusters + j]);
          const double x = Storage<T>::widen(centres[ego * width + j * channels + d]);
          const double g = Storage<T>::widen(grad[graph.member[k] * channels + d]);
          want[graph.member[k] * channels + d] += p * x;
          want_assign[k * clusters + j] += x * g;
          want_centres[ego * width + j * channels + d] += p * g;
        }
      }
    }
  }
  Output<T> first;
  for (const int64_t threads : {1, 4, 3}) {
    const ThreadExecutor executor(threads);
    const std::unique_ptr<StreamAll> streamed(threads == 3 ? new StreamAll : nullptr);
    cpu::kernels().cluster_scatter({Storage<T>::kType,
                                    &view,
                                    clusters,
                                    channels,
                                    assign.data(),
                                    centres.data(),
                                    {},
                                    out.data()},
                                   executor);
    cpu::kernels().cluster_scatter_backward({Storage<T>::kType,
                                             &view,
                                             clusters,
                                             channels,
                                             grad.data(),
                                             assign.data(),
                                             centres.data(),
                                             {},
                                             grad_assign.data(),
                                             grad_centres.data(),
                                             nullptr,
                                             nullptr,
                                             nullptr},
                                            executor);
    const double tolerance = Storage<T>::kTolerance;
    check_close(out.data(), want, tolerance, "scatter out");
    check_close(grad_assign.data(), want_assign, tolerance, "scatter grad_assign");
    check_close(grad_centres.data(), want_centres, tolerance, "scatter grad_clusters");
    if (threads == 1) first = out;
    CHECK(same_bits(first, out));
  }
}

// Forward by the definition; backward as its transpose: <centroids(z), g> = <z, backward(g)>.
template <class T, class Index>
void check_centroids(int64_t clusters, int64_t channels, const TestGraph<Index>& graph,
                     std::mt19937_64& random) {
  const cpu::Graph view = graph.view();
  const int64_t num_nodes = graph.num_nodes, groups = clusters - 1;
  const auto z = random_values<T>(num_nodes * channels, 1, random);
  const auto grad = random_values<T>(num_nodes * clusters * channels, 1, random);
  std::vector<T> out(num_nodes * clusters * channels), grad_z(num_nodes * channels);
  const ThreadExecutor executor(3);
  cpu::kernels().local_centroids(
      {Storage<T>::kType, &view, clusters, channels, z.data(), out.data()}, executor);
  cpu::kernels().local_centroids_backward(
      {Storage<T>::kType, &view, clusters, channels, grad.data(), grad_z.data()}, executor);
  Doubles want(out.size(), 0);
  for (int64_t ego = 0; ego < num_nodes; ++ego) {
    std::vector<int64_t> neighbours;
    for (int64_t k = graph.rowptr[ego]; k < graph.rowptr[ego + 1]; ++k) {
      if (clusters == 1 || graph.member[k] != ego) neighbours.push_back(graph.member[k]);
    }
    for (int64_t d = 0; d < channels; ++d) {
      const auto mean = [&](int64_t first, int64_t step) {
        double sum = 0, count = 0;
        for (size_t p = first; p < neighbours.size(); p += step, ++count) {
          sum += Storage<T>::widen(z[neighbours[p] * channels + d]);
        }
        return count > 0 ? sum / count : std::nan("");
      };
      double* row = want.data() + ego * clusters * channels + d;
      const double own = Storage<T>::widen(z[ego * channels + d]);
      row[0] = clusters == 1 ? mean(0, 1) : own;
      for (int64_t group = 0; group < groups; ++group) {
        double value = mean(group, groups);
        if (std::isnan(value)) value = neighbours.empty() ? own : mean(0, 1);
        row[(group + 1) * channels] = value;
      }
    }
  }
  check_close(out.data(), want, Storage<T>::kTolerance, "centroids");
  double left = 0, right = 0, size = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    left += want[i] * Storage<T>::widen(grad[i]);
    size += std::fabs(want[i] * Storage<T>::widen(grad[i]));
  }
  for (size_t i = 0; i < z.size(); ++i)
    right += Storage<T>::widen(z[i]) * Storage<T>::widen(grad_z[i]);
  CHECK(std::fabs(left - right) <= Storage<T>::kTolerance * size);
}

// A map of rows, with the weight as it is and transposed, and the sum of outer products.
template <class T>
void check_linear(int64_t rows, int64_t inputs, int64_t outputs, std::mt19937_64& random) {
  const auto x = random_values<T>(rows * inputs, 1, random);
  const auto g = random_values<T>(rows * outputs, 1, random);
  const auto weight = random_values<T>(outputs * inputs, 1, random);
  const auto bias = random_values<T>(outputs, 1, random);
  const auto at = [](const auto& values, int64_t k) { return Storage<T>::widen(values[k]); };
  Doubles want(rows * outputs, 0), want_turned(rows * outputs, 0), want_sums(outputs * inputs, 0);
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t o = 0; o < outputs; ++o) {
      want[n * outputs + o] = at(bias, o);
      for (int64_t k = 0; k < inputs; ++k) {
        want[n * outputs + o] += at(x, n * inputs + k) * at(weight, o * inputs + k);
        want_turned[n * outputs + o] += at(x, n * inputs + k) * at(weight, k * outputs + o);
        want_sums[o * inputs + k] += at(g, n * outputs + o) * at(x, n * inputs + k);
      }
    }
  }
  Output<T> first, first_sums;
  for (const int threads : {1, 2, 5}) {
    const ThreadExecutor executor(threads);
    const DType dtype = Storage<T>::kType;
    const auto map = [&](int64_t output_stride, int64_t input_stride, const T* shift) {
      Output<T> out(rows * outputs);
      cpu::kernels().linear({dtype,
                             rows,
                             inputs,
                             outputs,
                             x.data(),
                             weight.data(),
                             {output_stride, input_stride},
                             shift,
                             out.data()},
                            executor);
      return out;
    };
    const auto out = map(inputs, 1, bias.data()), turned = map(1, outputs, nullptr);
    Output<T> sums(outputs * inputs);
    cpu::kernels().outer_products({dtype, rows, outputs, inputs, g.data(), x.data(), sums.data()},
                                  executor);
    const double tolerance = Storage<T>::kTolerance;
    check_close(out.data(), want, tolerance, "linear");
    check_close(turned.data(), want_turned, tolerance, "linear, transposed weight");
    check_close(sums.data(), want_sums, tolerance, "outer products");
    if (threads == 1) {
      first = out;
      first_sums = sums;
    }
    {
      const StreamAll stream;
      CHECK(same_bits(first, map(inputs, 1, bias.data())));
    }
    CHECK(same_bits(first, out));
    CHECK(same_bits(first_sums, sums));
  }
}

template <class T>
void check_maps(std::mt19937_64& random) {
  for (const int64_t rows : {0, 1, 13, 800}) {
    for (const int64_t inputs : {0, 1, 5, 64}) {
      for (const int64_t outputs : {1, 7, 16, 33, 64}) {
        check_linear<T>(rows, inputs, outputs, random);
      }
    }
  }
  check_linear<T>(30, 400, 700, random);  // weights beyond the second cache
  check_linear<T>(5000, 3, 10, random);   // several parts
}

template <class T, class Index>
int check_all(std::mt19937_64& random) {
  int cases = 0;
  const TestGraph<Index> small(23, 60, 0, random), single(1, 0, 0, random);
  for (const CostScale cost_scale : {CostScale::kNone, CostScale::kMean, CostScale::kMax}) {
    for (const int64_t clusters : {1, 2, 3, 5}) {
      for (const int64_t channels : {1, 19, 64}) {
        for (const int64_t iters : {0, 1, 3}) {
          const Case c{clusters, channels, iters, 2., cost_scale};
          for (const bool fresh : {false, true}) {
            if (fresh && c.clusters != 2) continue;
            check_local<T>(c, small, fresh, random);
            check_local<T>(c, single, fresh, random);
          }
          check_global<T>(c, 100, random);
          ++cases;
        }
      }
    }
    // Logits beyond the range of the one-dimensional scaling form.
    const double lam = std::is_same_v<T, double> ? 400. : 60.;
    for (const int64_t iters : {1, 3})
      check_local<T>({2, 8, iters, lam, cost_scale}, small, iters == 1, random);
  }
  for (const int64_t clusters : {1, 2, 4}) {
    for (const int64_t channels : {3, 32, 130}) {
      check_scatter<T>(clusters, channels, small, random);
      check_centroids<T>(clusters, channels, small, random);
    }
  }
  const TestGraph<Index> hub(9000, 200, 9000, random);  // longer than kHubSlots
  for (const int64_t clusters : {2, 3}) {
    check_local<T>({clusters, 3, 2, 2., CostScale::kMax}, hub, false, random);
    if (clusters == 2) check_local<T>({2, 3, 2, 2., CostScale::kMean}, hub, true, random);
    check_scatter<T>(clusters, 3, hub, random);
    check_centroids<T>(clusters, 3, hub, random);
    check_global<T>({clusters, 3, 3, 2., CostScale::kMean}, 9000, random);
  }
  return cases;
}

}  // namespace
}  // namespace dcgnn::test

int main() {
  std::mt19937_64 random(11);
  int cases = 0;
  cases += dcgnn::test::check_all<double, int32_t>(random);
  cases += dcgnn::test::check_all<float, int64_t>(random);
  cases += dcgnn::test::check_all<dcgnn::cpu::BFloat16, int32_t>(random);
  dcgnn::test::check_maps<double>(random);
  dcgnn::test::check_maps<float>(random);
  dcgnn::test::check_maps<dcgnn::cpu::BFloat16>(random);
  std::printf("kernels (%s): %d transport cases\n", dcgnn::cpu::kernels().isa, cases);
  return 0;
}
