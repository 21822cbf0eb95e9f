/* The calls of the CUDA driver that `devices/cuda_driver.py` makes, on memory of the host. An allocation is a memfd that another
 * process opens by /proc; as with CUDA, a process can't open its own handle, and memory whose mapping was closed is not there. A
 * context that nobody has retained is gone, with all memory in it: nothing else of this process, such as torch, holds one. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, MOST = 4096 };

typedef struct { unsigned char reserved[64]; } Handle;
typedef struct { char magic[8]; int pid, fd; size_t nbytes; } Told;
typedef struct { uint64_t address; size_t nbytes; int fd, is_own; } Held;

static Held held[MOST];
static __thread int pushed;
static int retained;

static Held *at(uint64_t address)
{
    for (int i = 0; i < MOST; i++)
        if (held[i].address == address)
            return &held[i];
    return NULL;
}

static int map(uint64_t *address, int fd, size_t nbytes, int is_own)
{
    void *found = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    Held *slot = at(0);
    if (found == MAP_FAILED || slot == NULL)
        return OUT_OF_MEMORY;
    *slot = (Held){*address = (uint64_t)found, nbytes, fd, is_own};
    return 0;
}

static int unmap(uint64_t address, int is_own)
{
    Held *slot = address ? at(address) : NULL;
    if (!pushed || slot == NULL || slot->is_own != is_own)
        return INVALID_VALUE;
    munmap((void *)address, slot->nbytes);
    close(slot->fd);
    slot->address = 0;
    return 0;
}

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : 0; }
int cuGetErrorString(int code, const char **said) { *said = code == OUT_OF_MEMORY ? "out of memory" : "invalid argument"; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? INVALID_VALUE : 0; }

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    *context = (void *)(intptr_t)(device + 1);
    __atomic_add_fetch(&retained, 1, __ATOMIC_SEQ_CST);
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
    if (__atomic_sub_fetch(&retained, 1, __ATOMIC_SEQ_CST) == 0)
        for (int i = 0; i < MOST; i++)
            if (held[i].address) {
                munmap((void *)held[i].address, held[i].nbytes);
                close(held[i].fd);
                held[i].address = 0;
            }
    return device;
}

int cuCtxPushCurrent_v2(void *context) { pushed += context != NULL; return context ? 0 : INVALID_CONTEXT; }
int cuCtxPopCurrent_v2(void **context) { *context = (void *)1; pushed--; return 0; }

int cuMemAlloc_v2(uint64_t *address, size_t nbytes)
{
    int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
    if (!pushed || fd < 0 || ftruncate(fd, (off_t)nbytes))
        return OUT_OF_MEMORY;
    return map(address, fd, nbytes, 1);
}

int cuMemFree_v2(uint64_t address) { return unmap(address, 1); }

int cuIpcGetMemHandle(Handle *handle, uint64_t address)
{
    Held *slot = at(address);
    if (!pushed || slot == NULL || !slot->is_own)
        return INVALID_VALUE;
    Told told = {"fake-cu", getpid(), slot->fd, slot->nbytes};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &told, sizeof told);
    return 0;
}

int cuIpcOpenMemHandle_v2(uint64_t *address, Handle handle, unsigned flags)
{
    Told told;
    char path[64];
    memcpy(&told, &handle, sizeof told);
    if (!pushed || flags != 1 || memcmp(told.magic, "fake-cu", 8))
        return INVALID_VALUE;
    if (told.pid == getpid())
        return INVALID_CONTEXT;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", told.pid, told.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    return fd < 0 ? INVALID_VALUE : map(address, fd, told.nbytes, 0);
}

int cuIpcCloseMemHandle(uint64_t address) { return unmap(address, 0); }

enum { MOST_REGISTERED = 64 };
static struct { void *memory; size_t nbytes; } registered[MOST_REGISTERED];

size_t fake_registered(void)
{
    size_t nbytes = 0;
    for (int i = 0; i < MOST_REGISTERED; i++)
        nbytes += registered[i].memory ? registered[i].nbytes : 0;
    return nbytes;
}

int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t nbytes, void *stream)
{
    (void)stream; /* ends at once */
    memcpy((void *)target, (const void *)source, nbytes);
    return 0;
}

int cuMemHostRegister_v2(void *memory, size_t nbytes, unsigned flags)
{
    for (int i = 0; i < MOST_REGISTERED && pushed && flags == 9; i++)
        if (registered[i].memory == NULL) {
            registered[i].memory = memory, registered[i].nbytes = nbytes;
            return 0;
        }
    return INVALID_VALUE;
}

int cuMemHostUnregister(void *memory)
{
    for (int i = 0; i < MOST_REGISTERED; i++)
        if (pushed && registered[i].memory == memory && mprotect(memory, registered[i].nbytes, PROT_READ) == 0) {
            registered[i].memory = NULL;
            return 0;
        }
    return INVALID_VALUE; /* also for memory that is not mapped any more */
}
