/* A driver without devices: the part of libnvidia-ml.so.1 and of the CUDA runtime that shows which device a program requests.
 *
 * scripts/gpu_dry_run.py compiles it twice, as each library. STUB_GPUS is the number of devices that both report (H100,
 * 80 GiB, compute capability 9.0, joined by NVLink). A program that requests a context on a device gets an error, or blocks
 * forever with STUB_HOLD, and a line on standard error names the device: "stub driver: context on device 3".
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int gpus(void) {
  const char *text = getenv("STUB_GPUS");
  return text ? atoi(text) : 8;
}

#ifdef STUB_NVML

typedef void *Handle;
struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned int version; unsigned long long total, reserved, free, used; };

#define BYTES (80ULL << 30)
#define INDEX(handle) ((int)(size_t)(handle) - 1)

int nvmlInit_v2(void) { return getenv("STUB_NVML_ERROR") ? atoi(getenv("STUB_NVML_ERROR")) : 0; }
int nvmlInit(void) { return nvmlInit_v2(); }
int nvmlInitWithFlags(unsigned int flags) { (void)flags; return nvmlInit_v2(); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : "stub error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned int size) {
  snprintf(text, size, "%s", getenv("STUB_DRIVER") ? getenv("STUB_DRIVER") : "580.65.06");
  return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = getenv("STUB_CUDA") ? atoi(getenv("STUB_CUDA")) : 13000;
  return 0;
}
int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = gpus(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Handle *handle) {
  if ((int)index >= gpus()) return 2;
  *handle = (Handle)(size_t)(index + 1);
  return 0;
}
int nvmlDeviceGetHandleByIndex(unsigned int index, Handle *handle) { return nvmlDeviceGetHandleByIndex_v2(index, handle); }
int nvmlDeviceGetCount(unsigned int *count) { return nvmlDeviceGetCount_v2(count); }
int nvmlDeviceGetHandleByUUID(const char *uuid, Handle *handle) {
  int index;
  if (sscanf(uuid, "GPU-%8x", &index) != 1) return 6;
  return nvmlDeviceGetHandleByIndex_v2(index, handle);
}
int nvmlDeviceGetIndex(Handle handle, unsigned int *index) { *index = INDEX(handle); return 0; }
int nvmlDeviceGetUUID(Handle handle, char *text, unsigned int size) {
  snprintf(text, size, "GPU-%08x-0000-0000-0000-000000000000", INDEX(handle));
  return 0;
}
int nvmlDeviceGetName(Handle handle, char *text, unsigned int size) {
  (void)handle;
  snprintf(text, size, "NVIDIA H100 80GB HBM3");
  return 0;
}
int nvmlDeviceGetMemoryInfo(Handle handle, struct memory *memory) {
  (void)handle;
  memory->total = memory->free = BYTES;
  memory->used = 0;
  return 0;
}
int nvmlDeviceGetMemoryInfo_v2(Handle handle, struct memory_v2 *memory) {
  (void)handle;
  memory->total = memory->free = BYTES;
  memory->used = memory->reserved = 0;
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(Handle handle, int *major, int *minor) {
  (void)handle;
  *major = 9;
  *minor = 0;
  return 0;
}
int nvmlDeviceGetP2PStatus(Handle first, Handle second, int capability, int *status) {
  (void)first; (void)second; (void)capability;
  *status = 0;
  return 0;
}
int nvmlDeviceGetTopologyCommonAncestor(Handle first, Handle second, int *level) {
  (void)first; (void)second;
  *level = 50;
  return 0;
}

#else

/* Loaded as libcuda.so.1, this is the driver. Loaded first (LD_PRELOAD), it replaces a part of the CUDA runtime, whose own check of
 * the driver fails without a real one. */
typedef int Result;
enum { SUCCESS = 0, MEMORY_ALLOCATION = 2, INVALID_DEVICE = 101 };

Result cuInit(unsigned int flags) { (void)flags; return SUCCESS; }
Result cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
Result cuDeviceGetCount(int *count) { *count = gpus(); return SUCCESS; }
Result cuDevicePrimaryCtxGetState(int device, unsigned int *flags, int *is_active) {
  (void)device;
  *flags = 0;
  *is_active = 0;
  return SUCCESS;
}
Result cuGetErrorString(int code, const char **text) { (void)code; *text = "stub driver"; return SUCCESS; }

/* vLLM's extensions are linked with these. */
Result cuTensorMapEncodeTiled(void) { return MEMORY_ALLOCATION; }
Result cuMemAlloc_v2(void) { return MEMORY_ALLOCATION; }
Result cuMemFree_v2(void) { return MEMORY_ALLOCATION; }
Result cuMemCreate(void) { return MEMORY_ALLOCATION; }
Result cuMemMap(void) { return MEMORY_ALLOCATION; }
Result cuMemUnmap(void) { return MEMORY_ALLOCATION; }
Result cuMemRelease(void) { return MEMORY_ALLOCATION; }
Result cuMemSetAccess(void) { return MEMORY_ALLOCATION; }
Result cuMemAddressReserve(void) { return MEMORY_ALLOCATION; }
Result cuMemAddressFree(void) { return MEMORY_ALLOCATION; }
Result cuMemGetAllocationGranularity(void) { return MEMORY_ALLOCATION; }
Result cuCtxGetCurrent(void) { return MEMORY_ALLOCATION; }
Result cuCtxGetDevice(void) { return MEMORY_ALLOCATION; }
Result cuCtxSetCurrent(void) { return MEMORY_ALLOCATION; }
Result cuPointerGetAttribute(void) { return MEMORY_ALLOCATION; }
Result cuDeviceGet(void) { return MEMORY_ALLOCATION; }
Result cuDeviceGetAttribute(void) { return MEMORY_ALLOCATION; }
Result cuDevicePrimaryCtxRetain(void) { return MEMORY_ALLOCATION; }
Result cuGetProcAddress_v2(void) { return MEMORY_ALLOCATION; }

Result cudaGetDeviceCount(int *count) { *count = gpus(); return SUCCESS; }
Result cudaDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
Result cudaDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : 1; /* compute capability 9.0 */
  return SUCCESS;
}
Result cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return SUCCESS; }
Result cudaDeviceCanAccessPeer(int *can, int device, int peer) { (void)device; (void)peer; *can = 1; return SUCCESS; }
Result cudaGetDeviceProperties(void *properties, int device) {
  (void)device;
  memset(properties, 0, 512);
  return SUCCESS;
}
Result cudaGetLastError(void) { return SUCCESS; }
Result cudaPeekAtLastError(void) { return SUCCESS; }

static void context(int device) {
  fprintf(stderr, "stub driver: context on device %d\n", device);
  fflush(stderr);
  while (getenv("STUB_HOLD")) pause();
}
/* The first device is current from the start, and torch does not set the current device again. When torch sets a device, the
 * stub reports that none is current. */
Result cudaGetDevice(int *device) {
  Dl_info caller;
  int is_known = dladdr(__builtin_return_address(0), &caller) && caller.dli_sname;
  *device = is_known && strstr(caller.dli_sname, "SetDevice") ? gpus() : 0;
  return SUCCESS;
}
Result cudaSetDevice(int device) {
  if (device >= gpus()) return INVALID_DEVICE;
  context(device);
  return MEMORY_ALLOCATION;
}
Result cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  (void)free_bytes;
  (void)total_bytes;
  context(0);
  return MEMORY_ALLOCATION;
}

#endif
