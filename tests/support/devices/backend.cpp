// A device of torch without hardware: PrivateUse1, whose memory is the host's. What shmsync's simulated device
// (simulated.py) needs of torch: allocation, views, and a copy to the CPU for each operator that has no kernel here.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
thread_local c10::DeviceIndex current = 0;

thread_local std::int64_t streams[kDevices] = {};  // the calling thread's current ones

// As CUDA's allocator of torch: what is given back is used again by the stream that it was made on, perhaps while
// another stream still reads it, and never goes back to the system.
struct Block {
  std::tuple<c10::DeviceIndex, std::int64_t, std::size_t> pool;
  void* memory;
};
std::mutex lock;
auto& kept = *new std::map<std::tuple<c10::DeviceIndex, std::int64_t, std::size_t>, std::vector<void*>>;

void release(void* block) {
  const std::unique_ptr<Block> mine(static_cast<Block*>(block));
  const std::lock_guard<std::mutex> locked(lock);
  kept[mine->pool].push_back(mine->memory);
}

struct HostPages final : c10::Allocator {
  c10::DataPtr allocate(std::size_t size) override {
    if (size == 0) return {nullptr, {kDevice, current}};
    auto block = std::make_unique<Block>();
    block->pool = {current, streams[current], (size + 511) / 512 * 512};
    const std::lock_guard<std::mutex> locked(lock);
    auto& pool = kept[block->pool];
    if (pool.empty()) {
      block->memory = std::aligned_alloc(512, std::get<2>(block->pool));
      TORCH_CHECK(block->memory != nullptr, "no memory");
    } else {
      block->memory = pool.back();
      pool.pop_back();
    }
    void* const memory = block->memory;
    return {memory, block.release(), &release, {kDevice, current}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};
HostPages pages;
REGISTER_ALLOCATOR(kDevice, &pages);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device to) const override {
    const auto before = current;
    current = to.index();
    return {kDevice, before};
  }
  c10::Device getDevice() const override { return {kDevice, current}; }
  void setDevice(c10::Device to) const override { current = to.index(); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { current = to.index(); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return c10::Stream(c10::Stream::DEFAULT, stream.device()); }
  // Autograd starts a thread for each device that there is at its first backward pass, and then refuses backward passes
  // in forked children. So there is none, except where all tensors lie on devices.
  c10::DeviceIndex deviceCount() const noexcept override {
    static const bool everywhere = std::getenv("SHMSYNC_TEST_DEVICE") != nullptr;
    return everywhere ? kDevices : 0;
  }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    const auto before = current;
    current = storage.device().index();
    auto larger = pages.allocate(size);
    current = before;
    const auto held = std::min(size, impl->nbytes());
    if (held != 0) std::memcpy(larger.get(), impl->data(), held);
    impl->set_data_ptr_noswap(std::move(larger));
    impl->set_nbytes(size);
  }
};

struct At {  // the current device, for the life of this object
  explicit At(std::optional<c10::Device> device) : before(current) {
    if (device && device->has_index()) current = device->index();
  }
  ~At() { current = before; }
  c10::DeviceIndex before;
};

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const At there(device);
  return at::detail::empty_generic(size, &pages, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const At there(device);
  return at::detail::empty_strided_generic(size, stride, &pages, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const auto needed = (impl->storage_offset() + impl->numel()) * impl->dtype().itemsize();
  if (needed > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) resize(to, from.sizes(), std::nullopt);
  at::Tensor target = to;
  target.copy_(from);
  return to;
}

// A tensor over memory that the caller keeps.
at::Tensor wrap(int64_t address, int64_t size, int64_t index) {
  const c10::Device device(kDevice, static_cast<c10::DeviceIndex>(index));
  return at::from_blob(reinterpret_cast<void*>(address), {size}, [](void*) {},
                       at::TensorOptions().dtype(at::kByte).device(device), device);
}

// The same memory, as a tensor of the host's. It keeps an arena's pages mapped. Memory of the allocator it does not keep:
// what a stream still has to copy may be freed, and used again, before.
at::Tensor on_host(const at::Tensor& tensor) {
  const bool pooled = tensor.storage().data_ptr().get_deleter() == &release;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       [kept = pooled ? at::Tensor() : tensor](void*) {},
                       at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU), at::Device(at::kCPU));
}

void set_stream(int64_t index, int64_t given) { streams[index] = given; }

TORCH_LIBRARY(simulated, m) {
  m.def("wrap(int address, int size, int index) -> Tensor", &wrap);
  m.def("on_host(Tensor tensor) -> Tensor", &on_host);
  m.def("set_stream(int index, int stream) -> ()", &set_stream);
}

// What the way over the CPU does not do for every operator: torch leaves these two to each device, and batch_norm
// writes into tensors that its schema does not show as written.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, int64_t groups) {
  const auto plain = bias && bias->defined() ? std::optional<at::Tensor>(bias->cpu()) : std::nullopt;
  return at::convolution(input.cpu(), weight.cpu(), plain, stride, padding, dilation, transposed, output_padding, groups)
      .to(input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> wanted) {
  const int64_t channels = grad.size(1);
  auto [of_input, of_weight, of_bias] =
      at::convolution_backward(grad.cpu(), input.cpu(), weight.cpu(), c10::IntArrayRef(channels), stride, padding,
                               dilation, transposed, output_padding, groups, wanted);
  const auto there = [&](const at::Tensor& tensor) { return tensor.defined() ? tensor.to(input.device()) : tensor; };
  return {there(of_input), there(of_weight), there(of_bias)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double epsilon) {
  const auto plain = [](const std::optional<at::Tensor>& tensor) {
    return tensor && tensor->defined() ? std::optional<at::Tensor>(tensor->cpu()) : std::nullopt;
  };
  const auto new_mean = plain(mean), new_variance = plain(variance);
  auto [out, saved_mean, saved_scale] = at::native_batch_norm(input.cpu(), plain(weight), plain(bias), new_mean,
                                                             new_variance, training, momentum, epsilon);
  if (training && new_mean) at::Tensor(*mean).copy_(*new_mean);
  if (training && new_variance) at::Tensor(*variance).copy_(*new_variance);
  return {out.to(input.device()), saved_mean.to(input.device()), saved_scale.to(input.device())};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("native_batch_norm", &batch_norm);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("resize_", &resize);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
}

// An operator whose tensors lie in several places is refused, as CUDA does it; but tests may ask torch.equal().
void refuse_several_places(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  std::optional<c10::Device> place;
  const auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || (tensor.dim() == 0 && tensor.is_cpu())) return;
    TORCH_CHECK(!place || *place == tensor.device(), op.schema().name(), ": expected all tensors to be on one device, but",
                " found ", *place, " and ", tensor.device());
    place = tensor.device();
  };
  if (op.schema().name() == "aten::equal") return;
  for (const c10::IValue& each : torch::jit::last(stack, op.schema().arguments().size())) {
    if (each.isTensor()) look(each.toTensor());
    if (each.isTensorList())
      for (const at::Tensor& tensor : each.toTensorVector()) look(tensor);
  }
}

// A copy to or from a lazily conjugated or negated tensor looks at these flags itself.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(simulated, Conjugate, m) { m.impl("on_host", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(simulated, Negative, m) { m.impl("on_host", torch::CppFunction::makeFallthrough()); }

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  refuse_several_places(op, *stack);
  at::native::cpu_fallback(op, stack);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }
const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

}  // namespace
