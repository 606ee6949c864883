// dcgnn::ego_graph on the CPU: checks, index width, parallel split.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/ego_graph.h"

namespace dcgnn {
namespace {

struct TorchParallel {
  template <class Body>
  void operator()(int64_t count, const Body& body) const {
    at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(i);
    });
  }
};

using Arrays = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

template <class Input>
void check_range(const Input* ends, int64_t num_edges, int64_t num_nodes) {
  if (num_edges == 0) return;
  const cpu::Chunks chunks{2 * num_edges, at::get_num_threads()};
  std::vector<std::pair<Input, Input>> ranges(static_cast<size_t>(chunks.count));
  TorchParallel()(chunks.count, [&](int64_t chunk) {
    Input low = ends[0], high = ends[0];
    for (int64_t k = chunks.begin(chunk); k < chunks.end(chunk); ++k) {
      low = std::min(low, ends[k]);
      high = std::max(high, ends[k]);
    }
    ranges[static_cast<size_t>(chunk)] = {low, high};
  });
  auto [low, high] = ranges[0];
  for (const auto& range : ranges) {
    low = std::min(low, range.first);
    high = std::max(high, range.second);
  }
  TORCH_CHECK_INDEX(low >= 0, "edge_index holds the negative node index ", low);
  TORCH_CHECK_INDEX(high < num_nodes, "edge_index holds node index ", high,
                    ", out of range for num_nodes = ", num_nodes);
}

template <class Index, class Input>
Arrays build(const at::Tensor& edge_index, int64_t num_nodes, at::ScalarType dtype) {
  const int64_t num_edges = edge_index.size(1);
  const Input* source = edge_index.const_data_ptr<Input>();
  const TorchParallel parallel;
  const cpu::EgoGraphBuilder<Index, TorchParallel> builder(
      source, source + num_edges, num_edges, num_nodes, at::get_num_threads(), parallel);
  const auto options = edge_index.options().dtype(dtype);
  const int64_t num_slots = builder.num_slots();
  Arrays arrays{at::empty({num_nodes + 1}, options), at::empty({num_slots}, options),
                at::empty({num_nodes + 1}, options), at::empty({num_slots}, options),
                at::empty({num_slots}, options)};
  auto& [rowptr, member, colptr, ego, slot] = arrays;
  builder.write(rowptr.mutable_data_ptr<Index>(), member.mutable_data_ptr<Index>(),
                colptr.mutable_data_ptr<Index>(), ego.mutable_data_ptr<Index>(),
                slot.mutable_data_ptr<Index>());
  return arrays;
}

template <class Input>
Arrays build_checked(const at::Tensor& edge_index, int64_t num_nodes) {
  const int64_t num_edges = edge_index.size(1);
  check_range(edge_index.const_data_ptr<Input>(), num_edges, num_nodes);
  if (num_edges + num_nodes <= std::numeric_limits<int32_t>::max()) {
    return build<int32_t, Input>(edge_index, num_nodes, at::kInt);
  }
  return build<int64_t, Input>(edge_index, num_nodes, at::kLong);
}

Arrays ego_graph(const at::Tensor& edge_index, int64_t num_nodes) {
  TORCH_CHECK_VALUE(edge_index.dim() == 2 && edge_index.size(0) == 2,
                    "edge_index must have shape [2, num_edges], got ", edge_index.sizes());
  TORCH_CHECK_VALUE(num_nodes >= 0, "num_nodes must not be negative, got ", num_nodes);
  const at::Tensor edges = edge_index.contiguous();
  if (edges.scalar_type() == at::kLong) return build_checked<int64_t>(edges, num_nodes);
  TORCH_CHECK_VALUE(edges.scalar_type() == at::kInt, "edge_index must be int32 or int64, got ",
                    edges.scalar_type());
  return build_checked<int32_t>(edges, num_nodes);
}

}  // namespace

TORCH_LIBRARY_IMPL(dcgnn, CPU, library) { library.impl("ego_graph", &ego_graph); }

}  // namespace dcgnn
