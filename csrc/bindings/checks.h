// What the bindings share whatever the device: checks, and tensors as the kernels' plain structs.
// Each device has structs of its own with the same fields, hence the templates.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <string_view>
#include <utility>

namespace dcgnn {

inline void check_shape(const char* op, const char* name, const at::Tensor& tensor,
                        at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(tensor.sizes() == shape, op, ": ", name, " must have shape ", shape, ", got ",
                    tensor.sizes());
}

inline void check_same_dtype(const char* op, const char* name, const at::Tensor& tensor,
                             const at::Tensor& other) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == other.scalar_type(), op, ": ", name, " is ",
                    tensor.scalar_type(), ", wanted ", other.scalar_type());
}

inline void check_same_device(const char* op, const char* name, const at::Tensor& tensor,
                              const at::Tensor& other) {
  TORCH_CHECK_VALUE(tensor.device() == other.device(), op, ": ", name, " is on ", tensor.device(),
                    ", wanted ", other.device());
}

// Device and dtype of another tensor, and a shape.
inline void check_like(const char* op, const char* name, const at::Tensor& tensor,
                       at::IntArrayRef shape, const at::Tensor& other) {
  check_same_device(op, name, tensor, other);
  check_same_dtype(op, name, tensor, other);
  check_shape(op, name, tensor, shape);
}

// Sums, factors and workspaces: double for float64, float for everything else.
inline at::ScalarType wide_dtype(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

template <class Activation>
Activation parse_activation(const char* op, std::string_view name) {
  if (name == "none") return Activation::kNone;
  if (name == "relu") return Activation::kRelu;
  TORCH_CHECK_VALUE(name == "tanh", op, ": activation must be none, relu or tanh, got ", name);
  return Activation::kTanh;
}

// Holds contiguous copies, where needed, as long as the kernel runs or is being launched. Dtypes
// of the arrays beside rowptr, devices and values are left to the bindings of a device.
template <class Graph>
struct GraphTensors {
  at::Tensor rowptr, member, colptr, ego, slot;
  Graph graph;

  GraphTensors(const char* op, const at::Tensor& rowptr_, const at::Tensor& member_,
               const at::Tensor& colptr_, const at::Tensor& ego_, const at::Tensor& slot_)
      : rowptr(rowptr_.contiguous()),
        member(member_.contiguous()),
        colptr(colptr_.contiguous()),
        ego(ego_.contiguous()),
        slot(slot_.contiguous()) {
    const auto dtype = rowptr.scalar_type();
    TORCH_CHECK_VALUE(dtype == at::kInt || dtype == at::kLong, op,
                      ": rowptr must be int32 or int64, got ", dtype);
    for (const auto& [name, pointers] :
         {std::pair{"rowptr", &rowptr}, std::pair{"colptr", &colptr}}) {
      TORCH_CHECK_VALUE(pointers->numel() > 0, op, ": ", name, " must have at least one entry");
      check_shape(op, name, *pointers, {pointers->numel()});
    }
    const int64_t num_slots = member.numel();
    check_shape(op, "member", member, {num_slots});
    check_shape(op, "ego", ego, {num_slots});
    check_shape(op, "slot", slot, {num_slots});
    graph = {rowptr.numel() - 1,      colptr.numel() - 1,      num_slots,
             dtype == at::kLong,      rowptr.const_data_ptr(), member.const_data_ptr(),
             colptr.const_data_ptr(), ego.const_data_ptr(),    slot.const_data_ptr()};
  }

  using Named = std::pair<const char*, const at::Tensor&>;
  std::array<Named, 5> named() const {
    return {Named{"rowptr", rowptr},
            {"member", member},
            {"colptr", colptr},
            {"ego", ego},
            {"slot", slot}};
  }

  // For the ops that read a node and its own ego.
  void check_ego_of_every_node(const char* op) const {
    TORCH_CHECK_VALUE(graph.num_egos == graph.num_nodes, op,
                      ": the graph must have an ego for every node, got ", graph.num_egos,
                      " egos and ", graph.num_nodes, " nodes");
  }
};

template <class Graph>
void check_scatter(const char* op, const Graph& graph, const at::Tensor& assign,
                   const at::Tensor& clusters) {
  TORCH_CHECK_VALUE(clusters.dim() == 3, op, ": clusters must have shape [egos, K, F], got ",
                    clusters.sizes());
  check_shape(op, "clusters", clusters, {graph.num_egos, clusters.size(1), clusters.size(2)});
  check_like(op, "assign", assign, {graph.num_slots, clusters.size(1)}, clusters);
}

// What node_update takes beside the broadcast: checked and contiguous, factors in the dtype of the
// sums.
struct DenseArguments {
  at::Tensor global_assign, global_message;
  at::Tensor x_factor, global_factor, local_factor, ego_factor;

  void prepare(const char* op, const at::Tensor& message) {
    TORCH_CHECK_VALUE(global_assign.dim() == 2, op, ": global_assign must have shape [N, K], got ",
                      global_assign.sizes());
    const int64_t num_nodes = message.size(0), num_global = global_assign.size(1);
    check_like(op, "global_assign", global_assign, {num_nodes, num_global}, message);
    check_like(op, "global_message", global_message, {num_global, message.size(2)}, message);
    global_assign = global_assign.contiguous();
    global_message = global_message.contiguous();
    for (at::Tensor* factor : {&x_factor, &global_factor, &local_factor, &ego_factor}) {
      check_same_device(op, "a factor", *factor, message);
      check_shape(op, "a factor", *factor, {num_nodes});
      *factor = factor->to(wide_dtype(message)).contiguous();
    }
  }

  template <class NodeUpdate>
  NodeUpdate update(const at::Tensor& x, decltype(NodeUpdate::activation) activation) const {
    return {global_assign.size(1),
            x.const_data_ptr(),
            global_assign.const_data_ptr(),
            global_message.const_data_ptr(),
            ego_factor.const_data_ptr(),
            x_factor.const_data_ptr(),
            global_factor.const_data_ptr(),
            local_factor.const_data_ptr(),
            activation};
  }
};

}  // namespace dcgnn
