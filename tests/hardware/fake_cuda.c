/* A CUDA driver of two cards in host memory, with faults to order by FAKE_CUDA:
   `wrong`: direct copies from card 0 arrive as zeros; `staged`: so do those through the host;
   `hang`: direct copies from card 0 never end; `no_access`: no peer access is offered; `802`: cuInit fails so. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CARDS 2
#define CONTEXT_BYTES (100 << 20)
typedef struct { int card; } context;
static context contexts[CARDS] = {{0}, {1}};
static int current, access_from_0;

static int ordered(const char *fault) {
    const char *order = getenv("FAKE_CUDA");
    return order && !strcmp(order, fault);
}
static int is_second(void) {
    char words[4096] = {0};
    FILE *file = fopen("/proc/self/cmdline", "r");
    size_t count = fread(words, 1, sizeof words - 1, file), at = 0;
    fclose(file);
    for (; at < count; at += strlen(words + at) + 1)
        if (!strcmp(words + at, "--second")) return 1;
    return 0;
}
int cuInit(unsigned flags) { (void)flags; return ordered("802") ? 802 : 0; }
int cuGetErrorName(int status, const char **text) {
    *text = status == 802 ? "CUDA_ERROR_SYSTEM_NOT_READY" : "CUDA_ERROR_OTHER";
    return 0;
}
int cuDeviceGetCount(int *count) { *count = CARDS; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDevicePrimaryCtxRetain(void **made, int device) { *made = &contexts[device]; return 0; }
int cuCtxSetCurrent(void *used) { current = ((context *)used)->card; return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    /* The second process sees one context more in use; on card 1 a context takes twice as much. */
    *total = (size_t)1 << 33;
    *free_bytes = *total - (is_second() ? 2 : 1) * (size_t)CONTEXT_BYTES * (current + 1);
    return 0;
}
int cuMemAlloc_v2(uint64_t *pointer, size_t count) { *pointer = (uint64_t)malloc(count); return 0; }
int cuDeviceCanAccessPeer(int *answer, int device, int peer) {
    (void)device; (void)peer;
    *answer = !ordered("no_access");
    return 0;
}
int cuCtxEnablePeerAccess(void *peer, unsigned flags) {
    (void)flags;
    if (((context *)peer)->card == 0) access_from_0 = 1;
    return 0;
}
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t count) { memcpy((void *)to, from, count); return 0; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t count) { memcpy(to, (void *)from, count); return 0; }
int cuMemcpyPeer(uint64_t to, void *to_context, uint64_t from, void *from_context, size_t count) {
    int from_0 = ((context *)from_context)->card == 0;
    (void)to_context;
    if (from_0 && access_from_0 && ordered("hang")) pause();
    if (from_0 && (ordered("staged") || (access_from_0 && ordered("wrong")))) memset((void *)to, 0, count);
    else memcpy((void *)to, (void *)from, count);
    return 0;
}
