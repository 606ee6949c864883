// The table of one instruction set; compiled once for each, like the kernels.
#include "tables.h"

#define DCGNN_STRING(name) #name
#define DCGNN_NAME(name) DCGNN_STRING(name)

namespace dcgnn::cpu::DCGNN_ISA {

const KernelTable& table() {
  static const KernelTable kTable = {
      DCGNN_NAME(DCGNN_ISA),    local_sinkhorn,  local_sinkhorn_backward,  global_sinkhorn,
      global_sinkhorn_backward, cluster_scatter, cluster_scatter_backward, local_centroids,
      local_centroids_backward, linear,          outer_products,
  };
  return kTable;
}

}  // namespace dcgnn::cpu::DCGNN_ISA
