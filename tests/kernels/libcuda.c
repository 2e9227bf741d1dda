/* A CUDA driver with no device behind it: what Triton's launcher calls, checked and written down.

   It answers as an H200 would, runs nothing, and refuses launches and tensor maps that a real driver
   refuses. `take_launches` returns a line per launch since it was last called. */
#include "cuda.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SHARED = 232448, PLAIN_SHARED = 49152, THREADS = 1024, PROCESSORS = 132 };

struct kernel {
  char name[256];
  int shared;
};

static int device_context;
static char *journal;
static size_t written, room;

static CUresult when(int holds) { return holds ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }

const char *take_launches(void) {
  static char *taken;
  free(taken);
  taken = journal ? journal : strdup("");
  journal = NULL;
  written = room = 0;
  return taken;
}

static void note(const char *line) {
  size_t length = strlen(line);
  if (written + length + 1 > room) {
    room = 2 * (written + length + 1);
    journal = realloc(journal, room);
  }
  memcpy(journal + written, line, length + 1);
  written += length;
}

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version) {
  *version = 12080;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "refused by the stand-in for libcuda";
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = SHARED; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = SHARED + 1024; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = PROCESSORS; break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  default: *value = 1;
  }
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)&device_context;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) { return cuDevicePrimaryCtxRetain(context, 0); }

CUresult cuCtxGetDevice(CUdevice *device) { return cuDeviceGet(device, 0); }

CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  static int loaded;
  *module = (CUmodule)&loaded;
  /* a cubin is an ELF file */
  return when(memcmp(image, "\177ELF", 4) == 0);
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  struct kernel *kernel = calloc(1, sizeof *kernel);
  snprintf(kernel->name, sizeof kernel->name, "%s", name);
  kernel->shared = PLAIN_SHARED;
  *function = (CUfunction)kernel;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? THREADS : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
    return CUDA_ERROR_INVALID_VALUE;
  ((struct kernel *)function)->shared = value;
  return when(value <= SHARED);
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  *count = 1;
  return CUDA_SUCCESS;
}

/* tensors lie on the host: an address is what a kernel would get */
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *shape, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  int wide = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 || type == CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  unsigned row = box[0] * (wide ? 4 : 2);
  int holds = rank >= 1 && rank <= 5 && (size_t)map % 64 == 0 && (size_t)address % 16 == 0;
  for (unsigned i = 0; i < rank; i++) {
    holds &= shape[i] >= 1 && shape[i] <= 1ull << 32;
    holds &= box[i] >= 1 && box[i] <= 256 && steps[i] == 1;
    holds &= i + 1 == rank || (strides[i] % 16 == 0 && strides[i] < 1ull << 40);
  }
  if (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE)
    holds &= row <= (16u << swizzle);
  note("map\n");
  return when(holds && row % 16 == 0);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params,
                          void **extra) {
  struct kernel *kernel = (struct kernel *)function;
  char line[400];
  int holds = config->gridDimX >= 1 && config->gridDimX <= 2147483647u && config->gridDimY >= 1 &&
              config->gridDimY <= 65535 && config->gridDimZ >= 1 && config->gridDimZ <= 65535;
  holds &= config->blockDimX >= 1 && config->blockDimX <= THREADS && params != NULL;
  holds &= config->sharedMemBytes <= (unsigned)kernel->shared;
  snprintf(line, sizeof line, "%s %u %u\n", kernel->name, config->gridDimX * config->gridDimY,
           config->blockDimX);
  note(line);
  return when(holds);
}
