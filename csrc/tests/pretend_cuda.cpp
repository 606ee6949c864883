// Two CUDA devices that are not there, for machines without one: loaded before the CUDA runtime
// (LD_PRELOAD), this answers what PyTorch asks before it works with CUDA tensors. Memory is host
// memory that nobody computes on; kernels do not run: launches are recorded, or fail as asked for.
// With it autograd and torch.compile follow fake CUDA tensors, and the launchers of the extension
// can be watched from Python.
#include <driver_types.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#define PRETEND extern "C" __attribute__((visibility("default")))

namespace {

struct Grid {
  unsigned x, y, z;
};

int next_launch_error = 0;
int num_launches = 0;
int current_device = 0;
int last_device = 0;
Grid last_grid, last_block;
const void* last_stream = nullptr;

}  // namespace

// What the tests set and read.
PRETEND void pretend_reset(int error) {
  next_launch_error = error;
  num_launches = 0;
}
PRETEND int pretend_num_launches() { return num_launches; }
PRETEND unsigned pretend_last_grid() { return last_grid.x; }
PRETEND unsigned pretend_last_block() { return last_block.x; }
PRETEND int pretend_last_device() { return last_device; }
PRETEND const void* pretend_last_stream() { return last_stream; }

// The runtime: two equal devices, streams and events that are always done.
PRETEND int cudaGetDeviceCount(int* count) {
  *count = 2;
  return 0;
}
PRETEND int cudaGetDevice(int* device) {
  *device = current_device;
  return 0;
}
PRETEND int cudaSetDevice(int device) {
  current_device = device;
  return 0;
}
PRETEND int cudaGetLastError() {
  const int error = next_launch_error;
  next_launch_error = 0;
  return error;
}
PRETEND int cudaPeekAtLastError() { return 0; }
PRETEND int cudaDeviceSynchronize() { return 0; }
PRETEND int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return 0;
}
PRETEND int cudaStreamCreateWithPriority(void** stream, unsigned, int) {
  *stream = std::malloc(1);
  return 0;
}
PRETEND int cudaStreamIsCapturing(void*, int* status) {
  *status = 0;
  return 0;
}
PRETEND int cudaStreamGetPriority(void*, int* priority) {
  *priority = 0;
  return 0;
}
PRETEND int cudaStreamQuery(void*) { return 0; }
PRETEND int cudaStreamSynchronize(void*) { return 0; }
PRETEND int cudaStreamWaitEvent(void*, void*, unsigned) { return 0; }
PRETEND int cudaEventCreateWithFlags(void** event, unsigned) {
  *event = std::malloc(1);
  return 0;
}
PRETEND int cudaEventRecord(void*, void*) { return 0; }
PRETEND int cudaEventRecordWithFlags(void*, void*, unsigned) { return 0; }
PRETEND int cudaEventQuery(void*) { return 0; }
PRETEND int cudaEventDestroy(void* event) {
  std::free(event);
  return 0;
}
PRETEND int cudaDeviceGetAttribute(int* value, int, int) {
  *value = 4;
  return 0;
}
PRETEND int cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof(*properties));
  std::strcpy(properties->name, "no GPU");
  properties->major = 8;
  properties->multiProcessorCount = 4;
  properties->warpSize = 32;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->totalGlobalMem = size_t{1} << 33;
  return 0;
}
PRETEND int cudaMalloc(void** pointer, size_t size) {
  *pointer = std::aligned_alloc(512, (size + 511) / 512 * 512);
  return 0;
}
PRETEND int cudaFree(void* pointer) {
  std::free(pointer);
  return 0;
}
PRETEND int cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = size_t{1} << 33;
  return 0;
}
PRETEND int cudaMemcpyAsync(void* to, const void* from, size_t count, int, void*) {
  std::memcpy(to, from, count);
  return 0;
}
PRETEND int cudaMemsetAsync(void* to, int value, size_t count, void*) {
  std::memset(to, value, count);
  return 0;
}
// nvcc of CUDA 12 and older calls the first, newer ones the second.
PRETEND int cudaLaunchKernel(const void*, Grid grid, Grid block, void**, size_t, void* stream) {
  ++num_launches;
  last_grid = grid;
  last_block = block;
  last_device = current_device;
  last_stream = stream;
  return next_launch_error;
}
PRETEND int __cudaLaunchKernel(void* kernel, Grid grid, Grid block, void** args, size_t shared,
                               void* stream) {
  return cudaLaunchKernel(kernel, grid, block, args, shared, stream);
}
PRETEND int __cudaGetKernel(void** kernel, const void* function) {
  *kernel = const_cast<void*>(function);
  return 0;
}

// The driver: no context exists yet.
PRETEND int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 0;
  return 0;
}
