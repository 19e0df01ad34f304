#include "../quant/dequantize.h"

#include "handlers.h"
#include "weight.h"

namespace jaxq {
namespace {

void Run(cudaStream_t stream, std::string_view names, int64_t group, int64_t bits, int64_t act_bits,
         int64_t signed_nibbles, ffi::RemainingArgs arguments, ffi::Result<ffi::AnyBuffer> result) {
  RequireSupportedDevice();
  if (bits != 4 && bits != 8) Refuse("bits", std::to_string(bits), "4 or 8");
  if (act_bits != 8 && act_bits != 16) Refuse("act_bits", std::to_string(act_bits), "8 or 16");
  const Weight weight = ReadWeight(Operands(names, arguments), bits, group);
  const Array out("out", *result);
  const DType out_dtype = out.Type({DType::kF32, DType::kBF16, DType::kF16});
  out.RequireRank(2, "(k, n)");
  const int64_t n = out.dim(1);
  out.RequireShape({weight.k, n}, "(k, n), k as packed");
  RequireChannels(out, n, weight.n_padded);

  DequantizeArgs args{};
  args.packed = weight.packed;
  args.scales = weight.scales;
  args.scales_dtype = weight.scales_dtype;
  args.zeros = weight.zeros;
  args.zeros_dtype = weight.zeros_dtype;
  args.subscales = weight.subscales;
  args.out = out.data();
  args.out_dtype = out_dtype;
  args.k = weight.k;
  args.n = n;
  args.n_padded = weight.n_padded;
  args.group = weight.group;
  args.bits = static_cast<int>(bits);
  args.act_bits = static_cast<int>(act_bits);
  args.signed_nibbles = signed_nibbles != 0;
  RequireLaunched(LaunchDequantize(args, stream));
}

ffi::Error Handler(cudaStream_t stream, std::string_view operands, int64_t group, int64_t bits, int64_t act_bits,
                   int64_t signed_nibbles, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> out) {
  return Guarded("jaxq_dequantize", Run, stream, operands, group, bits, act_bits, signed_nibbles, args, out);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DequantizeHandler, Handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Attr<std::string_view>("operands")  // names of the arguments, in order
                                  .Attr<int64_t>("group")     // rows of a padded group, 0 for one scale per channel
                                  .Attr<int64_t>("bits")      // of a code: 4 or 8
                                  .Attr<int64_t>("act_bits")  // of the activations that the packed order is for
                                  .Attr<int64_t>("signed_nibbles")  // 4-bit codes are stored as two's complement
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>(),  // out (k, n)
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxq
