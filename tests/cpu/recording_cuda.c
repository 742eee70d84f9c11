/* A libcuda.so.1 that has one GPU of compute capability 9.0 and runs nothing: it writes down the last launch. */
#include "cuda.h"
#include <string.h>

int num_launches = 0, num_encoded = 0;
int num_parameters = 0, parameter_bytes[64]; /* of the kernel under test, stated by it */
unsigned char launched[64 * 128]; /* the parameters of the last launch, one behind the other */
unsigned grid[3], block, shared, num_attributes;
unsigned long long stream, function;

CUresult cuInit(unsigned flags) { return 0; }
CUresult cuDriverGetVersion(int *version) { *version = 12080; return 0; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return 0; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  default: *value = 227 * 1024;
  }
  return 0;
}
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return 0; }
CUresult cuCtxSetCurrent(CUcontext context) { return 0; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return 0; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return 0; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)1; return 0; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "recorded"; return 0; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)2; return 0; }
CUresult cuModuleUnload(CUmodule module) { return 0; }
CUresult cuModuleGetFunction(CUfunction *found, CUmodule module, const char *name) { *found = (CUfunction)3; return 0; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction of) { *value = 1024; return 0; }
CUresult cuFuncSetAttribute(CUfunction of, CUfunction_attribute attribute, int value) { return 0; }
CUresult cuFuncSetCacheConfig(CUfunction of, CUfunc_cache config) { return 0; }
CUresult cuStreamIsCapturing(CUstream of, CUstreamCaptureStatus *status) { *status = 0; return 0; }
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return 0;
}

/* Like the driver's: a function of its arguments. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                                const cuuint64_t *dim, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  unsigned char *bytes = (unsigned char *)map;
  unsigned char kinds[] = {type, rank, interleave, swizzle, promotion, fill};
  num_encoded++;
  memset(map, 0, sizeof *map);
  memcpy(bytes, &base, 8);
  memcpy(bytes + 8, kinds, sizeof kinds);
  memcpy(bytes + 16, dim, 8 * rank);
  memcpy(bytes + 56, strides, 8 * (rank - 1));
  memcpy(bytes + 96, box, 4 * rank);
  return 0;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction of, void **parameters, void **extra) {
  unsigned char *end = launched;
  num_launches++;
  grid[0] = config->gridDimX, grid[1] = config->gridDimY, grid[2] = config->gridDimZ;
  block = config->blockDimX, shared = config->sharedMemBytes, num_attributes = config->numAttrs;
  stream = (unsigned long long)config->hStream, function = (unsigned long long)of;
  for (int i = 0; i < num_parameters; i++) {
    memcpy(end, parameters[i], parameter_bytes[i]);
    end += parameter_bytes[i];
  }
  return 0;
}
