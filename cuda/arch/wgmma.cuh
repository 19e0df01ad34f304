// The instructions that only Hopper (sm_90a) has: barriers that count bytes, bulk and tensor copies, warpgroup MMA. One
// function each, named after its mnemonic. PTX ISA section in the comment.
//
// A wgmma reads its operands while the code goes on: see `wgmma_fence` and `keep_in_registers`.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace jaxq::ptx {

// 9.7.13.15 mbarrier: `arrivals` and the announced bytes complete a phase; waiting names the phase by its parity.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes the inits visible to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nwait: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra wait;\n}" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}

// 9.7.9.25 cp.async.bulk: `bytes` (a multiple of 16) GMEM -> SMEM; they count down at `barrier`.
__device__ __forceinline__ void cp_async_bulk(uint32_t smem, const void* gmem, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem),
               "l"(gmem), "r"(bytes), "r"(barrier)
               : "memory");
}
// The box of a 2-D tensor map at (col, row). Loads bring zeros from outside the tensor and count them as bytes; stores
// leave out what is outside.
__device__ __forceinline__ void cp_async_bulk_tensor_load(uint32_t smem, const CUtensorMap* map, int col, int row,
                                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(smem),
      "l"(map), "r"(col), "r"(row), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void cp_async_bulk_tensor_store(const CUtensorMap* map, int col, int row, uint32_t smem) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(col),
               "r"(row), "r"(smem)
               : "memory");
}
__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void cp_async_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but the last kPending groups of this thread's stores have read their SMEM.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// 9.7.13.4 fence.proxy: this thread's writes to SMEM, before a bulk store (or wgmma) reads them.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// 9.7.19.5 setmaxnreg: moves registers between the warpgroups of a CTA.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// 9.7.9.8 ld.shared, in program order with waits and wgmmas.
__device__ __forceinline__ uint4 ld_shared_v4(uint32_t smem) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(smem)
               : "memory");
  return v;
}
// 9.7.14.5.16 stmatrix: four 8 x 8 matrices of 16-bit elements, transposed; one row address a lane.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t smem, const uint32_t (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(v[0]),
               "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

// 9.7.15.7 wgmma.fence: the registers written before it are ready for the wgmmas after it.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all but the last kPending groups are done: their registers may be written, their SMEM refilled.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Pins the computation of an operand before the next fence. Without it the compiler moves it behind, and serializes
// every wgmma (ptxas warnings C7510 to C7520).
__device__ __forceinline__ void keep_in_registers(uint32_t (&a)[4]) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]));
}

// 9.7.15.5.1 matrix descriptors of K-major operands. A row holds as many bytes of k as the swizzle is wide (64 or 128);
// eight rows follow one another, and the next eight come right behind. The address must be a multiple of 8 rows; 32
// bytes of k further is kDescriptorStep more.
template <int kRowBytes>
__device__ __forceinline__ uint64_t SmemDescriptor(uint32_t smem) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2;
  constexpr uint64_t kStride = 8 * kRowBytes / 16;  // between groups of eight rows
  return kSwizzle << 62 | kStride << 32 | uint64_t{smem >> 4};
}
constexpr int kDescriptorStep = 2;

// 9.7.15.5.2 wgmma: c = a b, or c += a b when `accumulate`. Row of c: 64 of a; column: kCols of b, held in SMEM.
// `rs`: a comes from registers, `ss`: from SMEM. k is 32 bytes. Lane 4 g + j of warp w holds, for columns 8 t + 2 j (+
// 1), row 16 w + g in c[4 t] (c[4 t + 1]) and row 16 w + g + 8 in c[4 t + 2] (c[4 t + 3]).
template <int kCols>
struct Wgmma;

#define JAXQ_LIST64                                                                                                    \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30," \
  "%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,"   \
  "%59,%60,%61,%62,%63"
#define JAXQ_LIST128                                                                                                 \
  JAXQ_LIST64                                                                                                        \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91" \
  ",%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115" \
  ",%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define JAXQ_REGS8(t, c, i)                                                                                          \
  "+" t(c[i]), "+" t(c[i + 1]), "+" t(c[i + 2]), "+" t(c[i + 3]), "+" t(c[i + 4]), "+" t(c[i + 5]), "+" t(c[i + 6]), \
      "+" t(c[i + 7])
#define JAXQ_REGS32(t, c, i) \
  JAXQ_REGS8(t, c, i), JAXQ_REGS8(t, c, i + 8), JAXQ_REGS8(t, c, i + 16), JAXQ_REGS8(t, c, i + 24)
#define JAXQ_REGS64(t, c) JAXQ_REGS32(t, c, 0), JAXQ_REGS32(t, c, 32)
#define JAXQ_REGS128(t, c) JAXQ_REGS64(t, c), JAXQ_REGS32(t, c, 64), JAXQ_REGS32(t, c, 96)

// R: accumulators of a lane; P0 to P5: the operand numbers after them; END: the scale and transpose immediates.
#define JAXQ_WGMMA_RS(NAME, N, R, ACC, T, K_AND_TYPES, END, P0, P1, P2, P3, P4, P5)                              \
  static __device__ __forceinline__ void NAME(ACC(&c)[R], const uint32_t (&a)[4], uint64_t b, bool accumulate) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N K_AND_TYPES \
                 " {" JAXQ_LIST##R "}, {" P0 "," P1 "," P2 "," P3 "}, " P4 ", p" END ";\n}"                      \
                 : JAXQ_REGS##R(T, c)                                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));       \
  }
#define JAXQ_WGMMA_SS(NAME, N, R, ACC, T, K_AND_TYPES, END, P0, P1, P2)                                          \
  static __device__ __forceinline__ void NAME(ACC(&c)[R], uint64_t a, uint64_t b, bool accumulate) {             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N K_AND_TYPES \
                 " {" JAXQ_LIST##R "}, " P0 ", " P1 ", p" END ";\n}"                                             \
                 : JAXQ_REGS##R(T, c)                                                                            \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                           \
  }
#define JAXQ_WGMMA(N, R, P0, P1, P2, P3, P4, P5)                                                       \
  template <>                                                                                          \
  struct Wgmma<N> {                                                                                    \
    JAXQ_WGMMA_RS(rs_s8, N, R, int, "r", "k32.s32.s8.s8", "", P0, P1, P2, P3, P4, P5)                  \
    JAXQ_WGMMA_SS(ss_s8, N, R, int, "r", "k32.s32.s8.s8", "", P0, P1, P2)                              \
    JAXQ_WGMMA_RS(rs_bf16, N, R, float, "f", "k16.f32.bf16.bf16", ", 1, 1, 0", P0, P1, P2, P3, P4, P5) \
    JAXQ_WGMMA_RS(rs_f16, N, R, float, "f", "k16.f32.f16.f16", ", 1, 1, 0", P0, P1, P2, P3, P4, P5)    \
  };
JAXQ_WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
JAXQ_WGMMA(256, 128, "%128", "%129", "%130", "%131", "%132", "%133")
#undef JAXQ_WGMMA
#undef JAXQ_WGMMA_SS
#undef JAXQ_WGMMA_RS
#undef JAXQ_REGS128
#undef JAXQ_REGS64
#undef JAXQ_REGS32
#undef JAXQ_REGS8
#undef JAXQ_LIST128
#undef JAXQ_LIST64

}  // namespace jaxq::ptx
