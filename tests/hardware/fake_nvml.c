/* A management library of two cards that offers few readings, with faults to order by FAKE_NVML:
   `hang`: nvmlInit never returns; `mismatch`, `no_driver`: it fails so; `lost`: card 1 cannot be opened.
   FAKE_NVML_FILE names a file that is read at each call and gives the cards a life, a line each: `process CARD PID BYTES`,
   `use CARD PERCENT MEMORY_PERCENT`, `throttle CARD MASK`, `ecc CARD COUNT`, `xid CARD NUMBER`, `stall`. CARD counts from 1. */
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
typedef struct { unsigned pid; unsigned long long used; unsigned instance, compute; } process;
typedef struct { void *device; unsigned long long type, data; unsigned instance, compute; } event;

/* Calls `take` with the numbers of each line that begins so; answers whether there is such a file. */
static int lines(const char *word, void (*take)(long, unsigned long long, unsigned long long, void *), void *to) {
    char line[256], name[32];
    const char *path = getenv("FAKE_NVML_FILE");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) return 0;
    while (fgets(line, sizeof line, file)) {
        long card = 0;
        unsigned long long one = 0, two = 0;
        if (sscanf(line, "%31s %ld %llu %llu", name, &card, &one, &two) >= 1 && !strcmp(name, word)) take(card, one, two, to);
    }
    fclose(file);
    return 1;
}
typedef struct { long card; unsigned count; unsigned long long first, second, sum; process found[16]; } asked;
static void gather(long card, unsigned long long one, unsigned long long two, void *to) {
    asked *ask = to;
    if (ask->card && card != ask->card) return;
    if (ask->count < 16) ask->found[ask->count] = (process){(unsigned)one, two, 0, 0};
    ask->count++;
    ask->first = one;
    ask->second = two;
    ask->sum += two;
}
static int ask_for(const char *word, void *handle, asked *ask) {
    memset(ask, 0, sizeof *ask);
    ask->card = (long)handle;
    return lines(word, gather, ask);
}
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *rates) {
    asked ask;
    if (ask_for("stall", NULL, &ask) && ask.count) pause();
    if (!ask_for("use", handle, &ask)) return NOT_SUPPORTED;
    rates[0] = ask.first;
    rates[1] = ask.second;
    return 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *mask) {
    asked ask;
    if (!ask_for("throttle", handle, &ask)) return NOT_SUPPORTED;
    *mask = ask.first;
    return 0;
}
int nvmlDeviceGetTotalEccErrors(void *handle, int kind, int counter, unsigned long long *count) {
    asked ask;
    (void)kind; (void)counter;
    if (!ask_for("ecc", handle, &ask)) return NOT_SUPPORTED;
    *count = ask.first;
    return 0;
}
int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) { (void)handle; *milliwatts = 350000; return 0; }
int nvmlDeviceGetClockInfo(void *handle, int kind, unsigned *mhz) { (void)handle; (void)kind; *mhz = 1980; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process *into) {
    asked ask;
    if (!ask_for("process", handle, &ask)) return NOT_SUPPORTED;
    if (*count < ask.count) { *count = ask.count; return 7; }
    *count = ask.count;
    if (into) memcpy(into, ask.found, ask.count * sizeof(process));
    return 0;
}
static unsigned told_xids;
int nvmlEventSetCreate(void **set) { *set = &told_xids; return getenv("FAKE_NVML_FILE") ? 0 : NOT_SUPPORTED; }
int nvmlDeviceRegisterEvents(void *handle, unsigned long long types, void *set) {
    (void)handle; (void)types; (void)set;
    return 0;
}
static void next_xid(long card, unsigned long long number, unsigned long long unused, void *to) {
    void **state = to;
    unsigned *seen = state[1];
    (void)unused;
    if ((*seen)++ != told_xids) return;
    event *told = state[0];
    told->device = (void *)card;
    told->data = number;
}
int nvmlEventSetWait_v2(void *set, event *told, unsigned timeout) {
    unsigned seen = 0;
    void *state[2] = {told, &seen};
    (void)set; (void)timeout;
    memset(told, 0, sizeof *told);
    lines("xid", next_xid, state);
    if (!told->device) return 10;
    told_xids++;
    return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *handle, memory *info) {
    asked ask;
    info->total = 24ULL << 30;
    info->reserved = 1ULL << 28;
    info->used = ((unsigned long long)(long)handle) << 30;
    if (ask_for("process", handle, &ask)) info->used += ask.sum;
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
