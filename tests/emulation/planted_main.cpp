// Runs the kernels of planted.cuh on the host, with a bug and in the order of a seed, and compares
// with plain loops.
#include "tests/cuda_host.h"
// The kernels need the words of the line above.
#include "planted.cuh"

#include <utility>

static bool near(float a, double b) { return std::fabs(a - b) <= 1e-4 * (1 + std::fabs(b)); }

// The kernels with every bug, so that what calls them is compiled once.
template <size_t... kBugs>
struct Kernels {
  decltype(&block_sums<0>) block_sums_with[kNumBugs] = {&block_sums<kBugs>...};
  decltype(&double_rows<0>) double_rows_with[kNumBugs] = {&double_rows<kBugs>...};
  decltype(&reverse_lanes<0>) reverse_lanes_with[kNumBugs] = {&reverse_lanes<kBugs>...};
  explicit Kernels(std::index_sequence<kBugs...>) {}
};

static bool right(int bug, unsigned seed) {
  const Kernels kernels(std::make_index_sequence<kNumBugs>{});
  const int n = 300, rows = 10, width = 8;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> x(n), out(n, NAN), total(1, 0.f), table(rows * width), reversed(32, NAN);
  for (float& value : x) value = normal(random);
  for (float& value : table) value = normal(random);
  const std::vector<float> before = table;

  cuda_host::launch(
      3, 128, [&] { kernels.block_sums_with[bug](x.data(), out.data(), total.data(), n); }, seed);
  cuda_host::launch(1, 32, [&] { kernels.double_rows_with[bug](table.data(), rows, width); }, seed);
  cuda_host::launch(
      1, 32, [&] { kernels.reverse_lanes_with[bug](x.data(), reversed.data()); }, seed);

  bool good = true;
  double all = 0;
  for (int begin = 0; begin < n; begin += 128) {
    double sum = 0;
    for (int i = begin; i < std::min(n, begin + 128); ++i) sum += x[i];
    for (int i = begin; i < std::min(n, begin + 128); ++i) good = good && near(out[i], sum);
    all += sum;
  }
  good = good && near(total[0], all);
  for (int i = 0; i < rows * width; ++i) good = good && near(table[i], 2.0 * before[i]);
  for (int i = 0; i < 32; ++i) good = good && reversed[i] == x[31 - i];
  return good;
}

int main(int, char** arguments) {
  const bool good = right(std::atoi(arguments[1]), unsigned(std::atoi(arguments[2])));
  std::puts(good ? "right" : "wrong");
  return good ? 0 : 1;
}
