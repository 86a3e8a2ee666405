/* A stand-in for the NVIDIA driver's library: its virtual memory calls over files in memory.
 *
 * With it cuda-bindings, the descriptors between processes, and an engine's KV cache run for real
 * where there is no GPU: a handle is a memfd, a mapping an mmap of it, and an address can be read
 * by the CPU. It keeps the driver's rules (alignment, whole mappings, one mapping at a place,
 * access before use) and answers CUDA_ERROR_INVALID_VALUE to what breaks them. New memory is full
 * of garbage. STANDIN_CUDA_BYTES is what the device has, for each process on its own, and
 * STANDIN_CUDA_PAGE the size of its pages.
 *
 * Values and layouts: NVIDIA, CUDA Driver API, "Virtual Memory Management".
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500 };
enum { PINNED = 1, POSIX_DESCRIPTOR = 1, DEVICE = 1, READ_WRITE = 3 };
enum { MOST = 16384 };
#define PAGE page()
#define GARBAGE 0xAA
#define REQUIRE(holds) do { if (!(holds)) return INVALID_VALUE; } while (0)

typedef struct { int type, id; } Location;
typedef struct { int type, descriptors; Location location; void *meta; uint8_t flags[8]; } Prop;
typedef struct { Location location; int flags; } Access;

/* `held`: by a handle of this process; `created`: counted here; users: mappings and the handle. */
typedef struct { int file, users, held, created; size_t size; } Memory;
typedef struct { uintptr_t at; size_t size; Memory *memory; int usable; } Mapping;
typedef struct { uintptr_t at, raw; size_t size; } Reservation;

static Memory *memories[MOST];
static Mapping mappings[MOST];
static Reservation reservations[MOST];
static size_t used;

static size_t setting(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

static size_t total(void) { return setting("STANDIN_CUDA_BYTES", (size_t)1 << 30); }

static size_t page(void) {
    static size_t bytes;
    return bytes ? bytes : (bytes = setting("STANDIN_CUDA_PAGE", (size_t)2 << 20));
}

static Memory *memory_of(unsigned long long handle) {
    return handle && handle < MOST && memories[handle] && memories[handle]->held
        ? memories[handle] : NULL;
}

static unsigned long long handle_of(int file, size_t size, int created) {
    for (unsigned long long handle = 1; handle < MOST; handle++) {
        if (memories[handle]) continue;
        Memory *memory = calloc(1, sizeof *memory);
        *memory = (Memory){file, 1, 1, created, size};
        memories[handle] = memory;
        return handle;
    }
    return 0;
}

static void drop(Memory *memory) {
    if (--memory->users) return;
    if (memory->created) used -= memory->size;
    close(memory->file);
    for (int n = 1; n < MOST; n++) if (memories[n] == memory) memories[n] = NULL;
    free(memory);
}

static Mapping *mapping_at(uintptr_t at) {
    for (int n = 0; n < MOST; n++) if (mappings[n].memory && mappings[n].at == at) return &mappings[n];
    return NULL;
}

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }
int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { *device = 0; return ordinal ? 101 : SUCCESS; }
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; *context = &used; return SUCCESS; }
int cuCtxSetCurrent(void *context) { return context == &used ? SUCCESS : INVALID_VALUE; }
int cuDeviceGetAttribute(int *value, int which, int device) { (void)which; (void)device; *value = 1; return SUCCESS; }
int cuDeviceGetUuid(void *uuid, int device) { (void)device; memcpy(uuid, "stand-in device!", 16); return SUCCESS; }
int cuStreamCreate(void **stream, unsigned flags) { (void)flags; *stream = &used; return SUCCESS; }
int cuStreamSynchronize(void *stream) { return stream == &used ? SUCCESS : INVALID_VALUE; }

int cuMemGetAllocationGranularity(size_t *size, const Prop *prop, int option) {
    REQUIRE(prop->type == PINNED && prop->location.type == DEVICE && option == 0);
    *size = PAGE;
    return SUCCESS;
}

int cuMemGetInfo(size_t *left, size_t *all) { *all = total(); *left = *all - used; return SUCCESS; }

int cuMemAddressReserve(uintptr_t *at, size_t size, size_t alignment, uintptr_t hint, unsigned long long flags) {
    REQUIRE(size && size % PAGE == 0 && alignment % PAGE == 0 && !hint && !flags);
    for (int n = 0; n < MOST; n++) {
        if (reservations[n].size) continue;
        void *raw = mmap(NULL, size + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (raw == MAP_FAILED) return OUT_OF_MEMORY;
        *at = ((uintptr_t)raw + PAGE - 1) / PAGE * PAGE;
        reservations[n] = (Reservation){*at, (uintptr_t)raw, size};
        return SUCCESS;
    }
    return OUT_OF_MEMORY;
}

int cuMemAddressFree(uintptr_t at, size_t size) {
    for (int n = 0; n < MOST; n++)
        if (mappings[n].memory) REQUIRE(mappings[n].at + mappings[n].size <= at || at + size <= mappings[n].at);
    for (int n = 0; n < MOST; n++) {
        if (!size || reservations[n].at != at || reservations[n].size != size) continue;
        munmap((void *)reservations[n].raw, size + PAGE);
        reservations[n] = (Reservation){0};
        return SUCCESS;
    }
    return INVALID_VALUE;
}

int cuMemCreate(unsigned long long *handle, size_t size, const Prop *prop, unsigned long long flags) {
    REQUIRE(size && size % PAGE == 0 && !flags && prop->type == PINNED && prop->location.type == DEVICE);
    REQUIRE(prop->descriptors == POSIX_DESCRIPTOR);
    if (used + size > total()) return OUT_OF_MEMORY;
    int file = memfd_create("standin-cuda", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)size)) return OUT_OF_MEMORY;
    void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at == MAP_FAILED) return OUT_OF_MEMORY;
    memset(at, GARBAGE, size);
    munmap(at, size);
    *handle = handle_of(file, size, 1);
    used += size;
    return *handle ? SUCCESS : OUT_OF_MEMORY;
}

int cuMemRelease(unsigned long long handle) {
    Memory *memory = memory_of(handle);
    REQUIRE(memory);
    memory->held = 0;
    drop(memory);
    return SUCCESS;
}

int cuMemMap(uintptr_t at, size_t size, size_t offset, unsigned long long handle, unsigned long long flags) {
    Memory *memory = memory_of(handle);
    REQUIRE(memory && memory->size == size && !offset && !flags && at % PAGE == 0);
    int inside = 0, place = -1;
    for (int n = 0; n < MOST; n++) {
        inside |= reservations[n].size && reservations[n].at <= at && at + size <= reservations[n].at + reservations[n].size;
        if (!mappings[n].memory) place = place < 0 ? n : place;
        else REQUIRE(mappings[n].at + mappings[n].size <= at || at + size <= mappings[n].at);
    }
    REQUIRE(inside && place >= 0);
    if (mmap((void *)at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->file, 0) == MAP_FAILED) return OUT_OF_MEMORY;
    memory->users++;
    mappings[place] = (Mapping){at, size, memory, 0};
    return SUCCESS;
}

int cuMemUnmap(uintptr_t at, size_t size) {
    Mapping *mapping = mapping_at(at);
    REQUIRE(mapping && mapping->size == size);
    mmap((void *)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    drop(mapping->memory);
    *mapping = (Mapping){0};
    return SUCCESS;
}

int cuMemSetAccess(uintptr_t at, size_t size, const Access *access, size_t count) {
    REQUIRE(count == 1 && access->location.type == DEVICE && access->flags == READ_WRITE && size);
    for (uintptr_t next = at; next < at + size; next += PAGE) REQUIRE(mapping_at(next));
    for (uintptr_t next = at; next < at + size; next += PAGE) mapping_at(next)->usable = 1;
    return mprotect((void *)at, size, PROT_READ | PROT_WRITE) ? INVALID_VALUE : SUCCESS;
}

int cuMemExportToShareableHandle(int *file, unsigned long long handle, int kind, unsigned long long flags) {
    Memory *memory = memory_of(handle);
    REQUIRE(memory && kind == POSIX_DESCRIPTOR && !flags);
    *file = dup(memory->file);
    return *file < 0 ? OUT_OF_MEMORY : SUCCESS;
}

int cuMemImportFromShareableHandle(unsigned long long *handle, void *file, int kind) {
    int own = dup((int)(intptr_t)file);
    off_t size = own < 0 ? -1 : lseek(own, 0, SEEK_END);
    REQUIRE(kind == POSIX_DESCRIPTOR && size > 0);
    *handle = handle_of(own, (size_t)size, 0);
    return *handle ? SUCCESS : OUT_OF_MEMORY;
}

static int usable(uintptr_t at, size_t size) {
    for (uintptr_t next = at / PAGE * PAGE; next < at + size; next += PAGE) {
        Mapping *mapping = mapping_at(next);
        if (!mapping || !mapping->usable) return 0;
    }
    return 1;
}

int cuMemsetD8Async(uintptr_t at, unsigned char value, size_t size, void *stream) {
    REQUIRE(usable(at, size) && stream == &used);
    memset((void *)at, value, size);
    return SUCCESS;
}

int cuMemcpyDtoH(void *to, uintptr_t from, size_t size) {
    REQUIRE(usable(from, size));
    memcpy(to, (void *)from, size);
    return SUCCESS;
}

int cuMemcpyHtoD(uintptr_t to, const void *from, size_t size) {
    REQUIRE(usable(to, size));
    memcpy((void *)to, from, size);
    return SUCCESS;
}

#define CALL(name) {#name, (void *)name}
static const struct { const char *name; void *call; } calls[] = {
    CALL(cuInit), CALL(cuDriverGetVersion), CALL(cuDeviceGetCount), CALL(cuDeviceGet),
    CALL(cuDevicePrimaryCtxRetain), CALL(cuCtxSetCurrent), CALL(cuDeviceGetAttribute),
    CALL(cuDeviceGetUuid), CALL(cuStreamCreate), CALL(cuStreamSynchronize),
    CALL(cuMemGetAllocationGranularity), CALL(cuMemGetInfo), CALL(cuMemAddressReserve),
    CALL(cuMemAddressFree), CALL(cuMemCreate), CALL(cuMemRelease), CALL(cuMemMap),
    CALL(cuMemUnmap), CALL(cuMemSetAccess), CALL(cuMemExportToShareableHandle),
    CALL(cuMemImportFromShareableHandle), CALL(cuMemsetD8Async), CALL(cuMemcpyDtoH),
    CALL(cuMemcpyHtoD),
};

int cuGetProcAddress_v2(const char *name, void **call, int version, uint64_t flags, int *found) {
    (void)version;
    (void)flags;
    for (size_t n = 0; n < sizeof calls / sizeof *calls; n++) {
        if (strcmp(calls[n].name, name)) continue;
        *call = calls[n].call;
        if (found) *found = 0;
        return SUCCESS;
    }
    *call = !strcmp(name, "cuGetProcAddress") ? (void *)cuGetProcAddress_v2 : NULL;
    if (found) *found = *call ? 0 : 1;
    return *call ? SUCCESS : NOT_FOUND;
}
