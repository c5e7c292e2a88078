/* A management library of two cards that offers few readings, with faults to order by FAKE_NVML:
   `hang`: nvmlInit never returns; `mismatch`, `no_driver`: it fails so; `lost`: card 1 cannot be opened. */
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { NOT_SUPPORTED = 3, NOT_LOADED = 9, GPU_IS_LOST = 15, MISMATCH = 18 };
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory;

static int ordered(const char *fault) {
    const char *order = getenv("FAKE_NVML");
    return order && !strcmp(order, fault);
}
int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (ordered("hang")) pause();
    return ordered("mismatch") ? MISMATCH : ordered("no_driver") ? NOT_LOADED : 0;
}
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int status) {
    return status == MISMATCH ? "Driver/library version mismatch" : status == GPU_IS_LOST ? "GPU is lost" : "Error";
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "580.159"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = (void *)(long)(index + 1);
    return index == 1 && ordered("lost") ? GPU_IS_LOST : 0;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) { snprintf(text, size, "GPU-%ld", (long)handle); return 0; }
int nvmlDeviceGetName(void *handle, char *text, unsigned size) { (void)handle; snprintf(text, size, "Card"); return 0; }
int nvmlDeviceGetMemoryInfo_v2(void *handle, memory *info) {
    info->total = 24ULL << 30;
    info->reserved = 1ULL << 28;
    info->used = ((unsigned long long)(long)handle) << 30;
    info->free = info->total - info->reserved - info->used;
    return 0;
}
int nvmlDeviceGetEccMode(void *handle, unsigned *now, unsigned *pending) {
    (void)handle; (void)now; (void)pending;
    return NOT_SUPPORTED;
}
int nvmlDeviceGetPersistenceMode(void *handle, unsigned *mode) { *mode = (long)handle == 1; return 0; }
int nvmlDeviceGetTopologyCommonAncestor(void *one, void *other, unsigned *level) {
    (void)one; (void)other;
    *level = 30;
    return 0;
}
int nvmlDeviceGetP2PStatus(void *one, void *other, int index, int *status) {
    (void)one; (void)other;
    *status = index == 0 ? 0 : 5;
    return 0;
}
