// The four GEMM targets. They differ in a launcher and in the types that they accept: one handler serves them.
#include "../gemm/gemm.h"

#include "../quant/quantize.h"
#include "handlers.h"
#include "weight.h"

namespace jaxq {
namespace {

struct Gemm {
  std::string_view target;
  int64_t bits, act_bits;
  cudaError_t (*launch)(const GemmArgs&, cudaStream_t);
};

constexpr Gemm kW4A16{"jaxq_w4a16", 4, 16, LaunchW4A16};
constexpr Gemm kW8A16{"jaxq_w8a16", 8, 16, LaunchW8A16};
constexpr Gemm kW8A8{"jaxq_w8a8", 8, 8, LaunchW8A8};
constexpr Gemm kW4A8{"jaxq_w4a8", 4, 8, LaunchW4A8};

void ReadActivations(const Gemm& gemm, const Operands& operands, GemmArgs& args) {
  const Array x = operands["x"];
  x.RequireRank(2, "(m, k)");
  args.m = x.dim(0);
  x.RequireShape({args.m, args.k}, "(m, k), k as packed");
  args.x = x.data();
  args.x_dtype = gemm.act_bits == 16 ? x.Type({DType::kBF16, DType::kF16})
                                     : x.Type({DType::kS8, DType::kF32, DType::kBF16, DType::kF16});
  if (args.x_dtype == DType::kS8) {
    const Array x_scale = operands["x_scale"];
    x_scale.Type({DType::kF32});
    x_scale.RequireShape({args.m, 1}, "(m, 1)");
    args.x_scale = static_cast<const float*>(x_scale.data());
  }
}

// Replaces a float x by its codes and scales, which go into the call's last results.
void QuantizeActivations(ffi::RemainingRets results, cudaStream_t stream, GemmArgs& args) {
  const Array xq = ResultAt(results, 2, "xq"), xs = ResultAt(results, 3, "xs");
  xq.Type({DType::kS8});
  xq.RequireShape({args.m, args.k}, "(m, k)");
  xs.Type({DType::kF32});
  xs.RequireShape({args.m, 1}, "(m, 1)");
  auto* codes = static_cast<int8_t*>(xq.data());
  auto* scale = static_cast<float*>(xs.data());
  RequireLaunched(LaunchQuantizePerToken(args.x, args.x_dtype, codes, scale, args.m, args.k, stream));
  args.x = codes;
  args.x_dtype = DType::kS8;
  args.follows_quantizer = true;
  args.x_scale = scale;
}

void ReadEpilogue(const Operands& operands, GemmArgs& args) {
  if (operands.Has("bias")) {
    const Array bias = operands["bias"];
    args.bias_dtype = bias.Type({DType::kF32, DType::kBF16, DType::kF16});
    bias.RequireShape({args.n_padded}, "(n_padded)");
    args.bias = bias.data();
  }
  const bool is_scaled = operands.Has("out_scale");
  if (is_scaled) {
    const Array out_scale = operands["out_scale"];
    out_scale.Type({DType::kF32});
    out_scale.RequireShape({1}, "(1)");
    args.out_scale = static_cast<const float*>(out_scale.data());
  }
  if (is_scaled != (args.out_dtype == DType::kS8)) {
    Refuse("out_scale", is_scaled ? "present" : "absent", "present if out is int8, and only then");
  }
}

void ReadResults(const Gemm& gemm, ffi::RemainingRets results, GemmArgs& args) {
  const Array out = ResultAt(results, 0, "out"), workspace = ResultAt(results, 1, "workspace");
  args.out_dtype = gemm.act_bits == 8 && gemm.bits == 8
                       ? out.Type({DType::kF32, DType::kBF16, DType::kF16, DType::kS8, DType::kS32})
                       : out.Type({DType::kF32, DType::kBF16, DType::kF16});
  out.RequireRank(2, "(m, n)");
  args.n = out.dim(1);
  out.RequireShape({args.m, args.n}, "(m, n)");
  RequireChannels(out, args.n, args.n_padded);
  args.out = out.data();
  workspace.Type({DType::kU8});
  args.workspace = workspace.data();
  args.workspace_bytes = workspace.bytes();
}

void Run(const Gemm& gemm, cudaStream_t stream, std::string_view names, int64_t group, int64_t relu, int64_t config,
         ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  RequireSupportedDevice();
  const Operands operands(names, arguments);
  const Weight weight = ReadWeight(operands, gemm.bits, group);
  if (weight.subscales && (gemm.bits != 4 || gemm.act_bits != 8)) Refuse("subscales", "present", "absent but for W4A8");
  GemmArgs args{};
  args.packed = weight.packed;
  args.scales = weight.scales;
  args.scales_dtype = weight.scales_dtype;
  args.zeros = weight.zeros;
  args.zeros_dtype = weight.zeros_dtype;
  args.subscales = weight.subscales;
  args.k = weight.k;
  args.n_padded = weight.n_padded;
  args.group = weight.group;
  args.per_channel = group == 0;
  args.relu = relu != 0;
  args.config = static_cast<int>(config);
  ReadActivations(gemm, operands, args);
  ReadResults(gemm, results, args);
  if (args.out_dtype == DType::kS32 && (args.group < args.k || args.zeros))
    Refuse("out", "int32", "floating or int8 where the weight has groups or zeros");
  ReadEpilogue(operands, args);
  if (gemm.act_bits == 8 && args.x_dtype != DType::kS8) QuantizeActivations(results, stream, args);
  RequireLaunched(gemm.launch(args, stream));
}

template <const Gemm& kGemm>
ffi::Error Handler(cudaStream_t stream, std::string_view operands, int64_t group, int64_t relu, int64_t config,
                   ffi::RemainingArgs args, ffi::RemainingRets results) {
  return Guarded(kGemm.target, Run, kGemm, stream, operands, group, relu, config, args, results);
}

auto Binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Attr<std::string_view>("operands")  // names of the arguments, in order
      .Attr<int64_t>("group")              // rows of a padded group, 0 for one scale per channel
      .Attr<int64_t>("relu")
      .Attr<int64_t>("config")  // row of the kernel table, -1 for the heuristic
      .RemainingArgs()
      .RemainingRets();  // out (m, n), workspace (bytes), and for a float x with 8-bit activations xq (m, k), xs (m, 1)
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(W4A16Handler, Handler<kW4A16>, Binding(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(W8A16Handler, Handler<kW8A16>, Binding(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(W8A8Handler, Handler<kW8A8>, Binding(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(W4A8Handler, Handler<kW4A8>, Binding(), {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxq
