// An accelerator of torch's (`PrivateUse1`) whose memory the host can't touch, as on a GPU: a device address has no page that may be
// read or written. The bytes lie at another address, their shadow, which only this file knows. What torch calls is done on the
// shadows, or on copies by the CPU's kernels. New memory holds 0xEE. There are no queues: all is done when a call returns.
//
// What torch asks of such a backend: https://docs.pytorch.org/docs/stable/accelerator/index.html

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace {

constexpr size_t PAGE = 4096;
constexpr auto FAR = c10::DeviceType::PrivateUse1;

struct Block {
  char* shadow;
  size_t nbytes;
};

std::mutex guard;
std::map<const char*, Block> blocks;         // by device address
std::map<const char*, size_t> page_locked;   // by address
std::atomic<int64_t> allocated{0};
std::atomic<bool> in_use{false};

size_t whole_pages(size_t nbytes) { return (nbytes + PAGE - 1) / PAGE * PAGE; }

char* shadow_of(const void* address) {
  if (address == nullptr) return nullptr;
  std::lock_guard<std::mutex> held(guard);
  auto next = blocks.upper_bound(static_cast<const char*>(address));
  TORCH_CHECK(next != blocks.begin(), "not memory of this device");
  const auto& [start, block] = *std::prev(next);
  const size_t at = static_cast<const char*>(address) - start;
  TORCH_CHECK(at <= block.nbytes, "memory of this device that is free, or somebody else's");
  return block.shadow + at;
}

struct DeviceAllocator final : c10::Allocator {
  static void release(void* address) {
    Block block{};
    {
      std::lock_guard<std::mutex> held(guard);
      auto found = blocks.find(static_cast<char*>(address));
      if (found == blocks.end()) return;
      block = found->second;
      blocks.erase(found);
    }
    munmap(address, block.nbytes);
    munmap(block.shadow, block.nbytes);
    allocated -= static_cast<int64_t>(block.nbytes);
  }

  c10::DataPtr allocate(size_t asked) override {
    in_use = true;
    const c10::Device device(FAR, 0);
    if (asked == 0) return {nullptr, nullptr, &release, device};
    const size_t nbytes = whole_pages(asked);
    const int file = memfd_create("far-memory", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(nbytes)) == 0, "no memory");
    void* address = mmap(nullptr, nbytes, PROT_NONE, MAP_SHARED, file, 0);
    void* shadow = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    TORCH_CHECK(address != MAP_FAILED && shadow != MAP_FAILED, "no memory");
    memset(shadow, 0xEE, nbytes);
    {
      std::lock_guard<std::mutex> held(guard);
      blocks[static_cast<char*>(address)] = {static_cast<char*>(shadow), nbytes};
    }
    allocated += static_cast<int64_t>(nbytes);
    return {address, address, &release, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t nbytes) const override {
    memcpy(shadow_of(to), shadow_of(from), nbytes);
  }
};

DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(FAR, &device_allocator);

struct PageLockingAllocator final : c10::Allocator {
  static void release(void* address) {
    {
      std::lock_guard<std::mutex> held(guard);
      page_locked.erase(static_cast<char*>(address));
    }
    std::free(address);
  }

  c10::DataPtr allocate(size_t nbytes) override {
    void* address = nbytes != 0 ? std::aligned_alloc(PAGE, whole_pages(nbytes)) : nullptr;
    if (address != nullptr) {
      std::lock_guard<std::mutex> held(guard);
      page_locked[static_cast<char*>(address)] = nbytes;
    }
    return {address, address, &release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t nbytes) const override { memcpy(to, from, nbytes); }
};

PageLockingAllocator page_locking_allocator;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = FAR;
  explicit Guard(c10::DeviceType = FAR) {}
  c10::DeviceType type() const override { return FAR; }
  c10::Device exchangeDevice(c10::Device) const override { return {FAR, 0}; }
  c10::Device getDevice() const override { return {FAR, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, {FAR, 0}); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream({FAR, 0}); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return in_use; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &page_locking_allocator; }

  bool isPinnedPtr(const void* address) const override {
    std::lock_guard<std::mutex> held(guard);
    auto next = page_locked.upper_bound(static_cast<const char*>(address));
    if (next == page_locked.begin()) return false;
    const auto& [start, nbytes] = *std::prev(next);
    return static_cast<size_t>(static_cast<const char*>(address) - start) < nbytes;
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto made = device_allocator.allocate(nbytes);
    if (const size_t kept = std::min(nbytes, storage.nbytes())) {
      memcpy(shadow_of(made.get()), shadow_of(storage.data()), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(made));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
};

Hooks hooks;
[[maybe_unused]] const bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

// A tensor of the host over a tensor's shadow.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  const auto options = tensor.options().device(at::kCPU).pinned_memory(false);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(shadow_of(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

using Sizes = c10::SymIntArrayRef;
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

at::Tensor empty(Sizes sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto asked = C10_AS_INTARRAYREF_SLOW(sizes);
  return at::detail::empty_generic(asked, &device_allocator, KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(Sizes sizes, Sizes strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), &device_allocator,
                                           KEYS, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  on_host(target).copy_(on_host(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar item(const at::Tensor& tensor) { return on_host(tensor).item(); }

at::Tensor view(const at::Tensor& self, Sizes sizes) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes)); }

at::Tensor as_strided(const at::Tensor& self, Sizes sizes, Sizes strides, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                                           offset ? std::make_optional(offset->expect_int()) : std::nullopt);
}

at::Tensor reshape_alias(const at::Tensor& self, Sizes sizes, Sizes strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, c10::SymInt offset, Sizes sizes, Sizes strides) {
  return at::cpu::set_(self, storage, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

const at::Tensor& resize(const at::Tensor& self, Sizes sizes, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(sizes), format);
}

at::Tensor unfold(const at::Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

// As CUDA's tensors and the host's: `Module.to` keeps a parameter the same object, and so what is tied stays tied.
bool may_hold_data_of(const at::Tensor&, const at::Tensor&) { return true; }

void on_copies(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_copies>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("view", view);
  library.impl("as_strided", as_strided);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("resize_", resize);
  library.impl("unfold", unfold);
  library.impl("_has_compatible_shallow_copy_type", may_hold_data_of);
}

TORCH_LIBRARY_IMPL(aten, CPU, library) {
  // For a call that changes a tensor of the host, and reads some that lie here.
  library.impl("_copy_from_and_resize", copy_from_and_resize);
}

TORCH_LIBRARY(far, library) {
  library.def("is_in_use() -> bool", [] { return in_use.load(); });
  library.def("allocated_bytes() -> int", [] { return allocated.load(); });
}
