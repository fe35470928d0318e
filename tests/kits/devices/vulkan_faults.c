/* A Vulkan driver that forwards to another one, with device memory that ends and a device that is lost.
 *
 * VULKAN_FAULTS_DRIVER is the library of the other driver. Types are those of the Vulkan specification; only
 * the members that are read are declared. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { OUT_OF_DEVICE_MEMORY = -2, DEVICE_LOST = -4 };
typedef void (*Function)(void);
typedef Function (*Lookup)(void *, const char *);
typedef struct {
  int32_t type;
  const void *next;
  uint64_t size;
} AllocateInfo;

static atomic_llong bytes_left = INT64_MAX / 2;
static atomic_long submits_left = -1, refused, lost;
static int (*allocate_memory)(void *, const AllocateInfo *, const void *, void *);
static int (*queue_submit)(void *, uint32_t, const void *, void *);
static int (*queue_submit2)(void *, uint32_t, const void *, void *);
static Lookup device_function;

void fault_memory(long long bytes) { bytes_left = bytes; }
void fault_lose_after(long submits) {
  submits_left = submits;
  lost = 0;
}
long fault_refused(void) { return refused; }
long fault_lost(void) { return lost; }

static void *driver(const char *name) {
  static void *library;
  if (!library) library = dlopen(getenv("VULKAN_FAULTS_DRIVER"), RTLD_NOW);
  return library ? dlsym(library, name) : NULL;
}

static int allocate(void *device, const AllocateInfo *info, const void *callbacks, void *memory) {
  if ((long long)info->size > bytes_left) {
    ++refused;
    return OUT_OF_DEVICE_MEMORY;
  }
  bytes_left -= (long long)info->size;
  return allocate_memory(device, info, callbacks, memory);
}

static int is_lost(void) {
  if (lost || submits_left < 0 || submits_left-- > 0) return lost != 0;
  return lost = 1;
}
static int submit(void *queue, uint32_t count, const void *work, void *fence) {
  return is_lost() ? DEVICE_LOST : queue_submit(queue, count, work, fence);
}
static int submit2(void *queue, uint32_t count, const void *work, void *fence) {
  return is_lost() ? DEVICE_LOST : queue_submit2(queue, count, work, fence);
}

static Function ours(const char *name, Function theirs) {
#define WRAP(vulkan, keep, wrapper)                  \
  if (theirs && !strcmp(name, vulkan)) {             \
    keep = (void *)theirs;                           \
    return (Function)wrapper;                        \
  }
  WRAP("vkAllocateMemory", allocate_memory, allocate)
  WRAP("vkQueueSubmit", queue_submit, submit)
  WRAP("vkQueueSubmit2", queue_submit2, submit2)
  WRAP("vkQueueSubmit2KHR", queue_submit2, submit2)
  return theirs;
}

static Function device_lookup(void *device, const char *name) { return ours(name, device_function(device, name)); }

Function vk_icdGetInstanceProcAddr(void *instance, const char *name) {
  Function theirs = ((Lookup)driver("vk_icdGetInstanceProcAddr"))(instance, name);
  if (theirs && !strcmp(name, "vkGetDeviceProcAddr")) {
    device_function = (Lookup)theirs;
    return (Function)device_lookup;
  }
  return ours(name, theirs);
}

Function vk_icdGetPhysicalDeviceProcAddr(void *instance, const char *name) {
  Lookup theirs = (Lookup)driver("vk_icdGetPhysicalDeviceProcAddr");
  return theirs ? theirs(instance, name) : NULL;
}

int vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t *version) {
  int (*theirs)(uint32_t *) = (int (*)(uint32_t *))driver("vk_icdNegotiateLoaderICDInterfaceVersion");
  return theirs(version);
}
