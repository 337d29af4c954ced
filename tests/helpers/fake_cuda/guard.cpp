// What torch lacks on a machine without a GPU before autograd takes fake CUDA tensors: a device guard,
// CUDA hooks and an accelerator. Loaded before libtorch_cpu.so, whose own functions of these names are
// then found second.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
const c10::Device device0(c10::DeviceType::CUDA, 0);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return device0; }
  c10::Device getDevice() const override { return device0; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, device0); }
};

struct Hooks final : at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
  void init() const override {}
};
}  // namespace

namespace at::detail {
const CUDAHooksInterface& getCUDAHooks() {
  static Hooks hooks;
  return hooks;
}
}  // namespace at::detail

namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
c10::DeviceIndex getDeviceIndex() { return 0; }
void setDeviceIndex(c10::DeviceIndex) {}
}  // namespace at::accelerator

extern "C" void set_guard() {
  static Guard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
}
