// What the tests of the CUDA kernels share: graphs with every kind of segment, storage types, and
// the formulas of the broadcast and its backward as plain double loops.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "cuda/numeric.cuh"
#include "cuda/types.h"

namespace dcgnn::test {

template <class T>
constexpr cuda::DType kDType = cuda::DType::kFloat32;
template <>
constexpr cuda::DType kDType<double> = cuda::DType::kFloat64;
template <>
constexpr cuda::DType kDType<cuda::Half> = cuda::DType::kFloat16;
template <>
constexpr cuda::DType kDType<cuda::BFloat16> = cuda::DType::kBFloat16;

// Unit roundoff of storage.
template <class T>
constexpr double kRounding = 0x1p-24;
template <>
constexpr double kRounding<double> = 0x1p-53;
template <>
constexpr double kRounding<cuda::Half> = 0x1p-11;
template <>
constexpr double kRounding<cuda::BFloat16> = 0x1p-8;

// CSR of the egos and its transpose.
template <class Index>
struct TestGraph {
  std::vector<Index> rowptr{0}, member, colptr{0}, ego, slot;

  int64_t num_nodes() const { return int64_t(rowptr.size()) - 1; }
  int64_t num_slots() const { return int64_t(member.size()); }

  explicit TestGraph(const std::vector<std::vector<int>>& egos) {
    std::vector<std::vector<std::pair<int, int>>> transpose(egos.size());
    for (size_t u = 0; u < egos.size(); ++u) {
      for (int node : egos[u]) {
        transpose[node].emplace_back(int(u), int(member.size()));
        member.push_back(Index(node));
      }
      rowptr.push_back(Index(member.size()));
    }
    for (const auto& entries : transpose) {
      for (const auto& [u, position] : entries) {
        ego.push_back(Index(u));
        slot.push_back(Index(position));
      }
      colptr.push_back(Index(ego.size()));
    }
  }

  cuda::Graph view() const {
    return {num_nodes(),   num_nodes(),   num_slots(), sizeof(Index) == 8, rowptr.data(),
            member.data(), colptr.data(), ego.data(),  slot.data()};
  }
};

// Random egos. Node `hub` is in every ego and its ego holds every node; `medium` is in `reach` egos
// and its ego has `reach` members; negative: none.
inline std::vector<std::vector<int>> random_egos(int num_nodes, int hub, int medium, int reach,
                                                 unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::vector<int>> egos(num_nodes);
  for (int u = 0; u < num_nodes; ++u) {
    auto& members = egos[u];
    members.push_back(u);
    for (unsigned i = random() % 4; i > 0; --i) members.push_back(int(random() % num_nodes));
    if (hub >= 0) members.push_back(hub);
    if (medium >= 0 && u < reach) members.push_back(medium);
    for (int node = 0; node < num_nodes && (u == hub || (u == medium && node < reach)); ++node) {
      members.push_back(node);
    }
    std::sort(members.begin(), members.end());
    members.erase(std::unique(members.begin(), members.end()), members.end());
  }
  return egos;
}

template <class T>
std::vector<T> random_values(int64_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<T> values(count);
  for (T& value : values) value = cuda::narrow<T>(cuda::Acc<T>(normal(random)));
  return values;
}

template <class T>
std::vector<double> as_double(const T* values, int64_t count) {
  std::vector<double> result(count);
  for (int64_t i = 0; i < count; ++i) result[i] = double(cuda::widen(values[i]));
  return result;
}

// A sum and the sum of absolute values, which rounding errors are measured by.
struct Sum {
  double value = 0, magnitude = 0;
  void add(double term) {
    value += term;
    magnitude += term < 0 ? -term : term;
  }
};

inline double factor_of(const std::vector<double>& factors, int64_t i) {
  return factors.empty() ? 1.0 : factors[i];
}

// Inputs of one call as doubles; empty factors count 1, empty x: no dense part.
struct NaiveCall {
  int64_t num_clusters, channels, num_global;
  std::vector<double> assign, clusters, x, global_assign, global_message, grad;
  std::vector<double> ego_factor, x_factor, global_factor, local_factor;
};

template <class Index>
std::vector<Sum> naive_forward(const TestGraph<Index>& graph, const NaiveCall& call) {
  std::vector<Sum> out(graph.num_nodes() * call.channels);
  for (int64_t u = 0; u < graph.num_nodes(); ++u) {
    for (int64_t s = graph.rowptr[u]; s < graph.rowptr[u + 1]; ++s) {
      const int64_t i = graph.member[s];
      const double factor = factor_of(call.local_factor, i) * factor_of(call.ego_factor, u);
      for (int64_t j = 0; j < call.num_clusters; ++j) {
        for (int64_t f = 0; f < call.channels; ++f) {
          out[i * call.channels + f].add(
              factor * call.assign[s * call.num_clusters + j] *
              call.clusters[(u * call.num_clusters + j) * call.channels + f]);
        }
      }
    }
  }
  if (call.x.empty()) return out;
  for (int64_t i = 0; i < graph.num_nodes(); ++i) {
    for (int64_t f = 0; f < call.channels; ++f) {
      Sum& sum = out[i * call.channels + f];
      sum.add(call.x_factor[i] * call.x[i * call.channels + f]);
      for (int64_t j = 0; j < call.num_global; ++j) {
        sum.add(call.global_factor[i] * call.global_assign[i * call.num_global + j] *
                call.global_message[j * call.channels + f]);
      }
    }
  }
  return out;
}

template <class Index>
void naive_backward(const TestGraph<Index>& graph, const NaiveCall& call,
                    std::vector<Sum>& grad_assign, std::vector<Sum>& grad_clusters) {
  grad_assign.assign(graph.num_slots() * call.num_clusters, {});
  grad_clusters.assign(graph.num_nodes() * call.num_clusters * call.channels, {});
  for (int64_t u = 0; u < graph.num_nodes(); ++u) {
    for (int64_t s = graph.rowptr[u]; s < graph.rowptr[u + 1]; ++s) {
      const int64_t i = graph.member[s];
      const double factor = factor_of(call.local_factor, i) * factor_of(call.ego_factor, u);
      for (int64_t j = 0; j < call.num_clusters; ++j) {
        for (int64_t f = 0; f < call.channels; ++f) {
          const double grad = factor * call.grad[i * call.channels + f];
          const int64_t cluster = (u * call.num_clusters + j) * call.channels + f;
          grad_assign[s * call.num_clusters + j].add(grad * call.clusters[cluster]);
          grad_clusters[cluster].add(grad * call.assign[s * call.num_clusters + j]);
        }
      }
    }
  }
}

}  // namespace dcgnn::test
