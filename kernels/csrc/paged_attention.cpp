// Paged attention for CPUs, as the contract in attention.py states it. Plain pointers, no torch headers.
//
// The body is compiled once per instruction set (`paged_body.inc`) and chosen at run time, so the binary runs on
// any x86-64 or ARM machine. OpenMP comes from the process (torch's own runtime): link without one.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

struct Call {
    const float* q;           // [num_tokens, num_heads, head_size], `q_stride` floats from token to token
    float* out;               // [num_tokens, num_heads, head_size], dense
    void* keys;               // [num_blocks, block_size, num_kv_heads, head_size], float or half
    void* values;             // alike
    const int32_t* table;     // [num_reqs, table_stride]
    const int32_t* starts;    // [num_reqs + 1]
    const int32_t* seq_lens;  // [num_reqs]
    int64_t q_stride, table_stride;
    int32_t num_heads, num_kv_heads, head_size, block_size, window;
    float scale;
};

// The step's new keys and values, each [num_tokens, num_kv_heads * head_size] with a stride in floats.
struct NewTokens {
    const float *k, *v;
    const int64_t* slots;
    int64_t num_tokens, k_stride, v_stride;
};

// One unit of work: some consecutive queries of one request, for `num_heads` KV heads and the query heads sharing them.
struct Item {
    int32_t request, kv_head, num_heads, first_query, num_queries;
};

constexpr int kMaxRows = 64;       // rows (queries x heads per KV head) of one item
constexpr int kFewRows = 8;        // up to here dot products beat turning the keys round
constexpr int kKeysAtOnce = 16;    // keys whose scores are worked out together
constexpr int kMaxHeadSize = 256;
constexpr float kMasked = -1e30f;  // score of a key that a query must not see

struct Scratch {
    float turned[kMaxHeadSize * kKeysAtOnce], values[kMaxHeadSize * kKeysAtOnce], scores[kMaxRows * kKeysAtOnce];
};

}  // namespace

// ---- baseline: whatever the compiler makes of it -------------------------------------------------------------------
namespace baseline {
#define LANES 4
static inline float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff, bits;
    if (magnitude >= 0x7c00) bits = 0x7f800000 | (magnitude << 13);
    else if (magnitude >= 0x400) bits = (magnitude << 13) + 0x38000000;
    else { float tiny = magnitude * 5.9604644775390625e-8f; std::memcpy(&bits, &tiny, 4); }
    bits |= sign;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
static inline uint16_t float_to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint32_t sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;  // rounds to infinity
    if (bits < 0x38800000) {                       // subnormal: let the FPU round to a multiple of 2^-24
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        return sign | (uint16_t)std::lrintf(magnitude * 16777216.0f);
    }
    uint32_t odd = (bits >> 13) & 1;
    return sign | (uint16_t)((bits + 0xfff + odd - 0x38000000) >> 13);
}
typedef float vec __attribute__((vector_size(16)));
static inline vec load(const float* p) { vec v; std::memcpy(&v, p, sizeof v); return v; }
static inline vec load(const uint16_t* p) {
    return vec{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
static inline void store_as(float* p, vec v) { std::memcpy(p, &v, sizeof v); }
static inline float sum(vec v) { return (v[0] + v[1]) + (v[2] + v[3]); }
static inline void store_as(uint16_t* p, vec v) { for (int i = 0; i < 4; ++i) p[i] = float_to_half(v[i]); }
#include "paged_body.inc"
#undef LANES
}  // namespace baseline

#if defined(__x86_64__)
// ---- AVX2 ----------------------------------------------------------------------------------------------------------
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace avx2 {
#define LANES 8
typedef float vec __attribute__((vector_size(32)));
static inline vec load(const float* p) { return (vec)_mm256_loadu_ps(p); }
static inline vec load(const uint16_t* p) { return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static inline void store_as(float* p, vec v) { _mm256_storeu_ps(p, (__m256)v); }
static inline float sum(vec v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
static inline void store_as(uint16_t* p, vec v) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, 0)); }
#include "paged_body.inc"
#undef LANES
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c,prefer-vector-width=512")
#endif
// ---- AVX-512 -------------------------------------------------------------------------------------------------------
namespace avx512 {
#define LANES 16
typedef float vec __attribute__((vector_size(64)));
static inline vec load(const float* p) { return (vec)_mm512_loadu_ps(p); }
static inline vec load(const uint16_t* p) { return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline void store_as(float* p, vec v) { _mm512_storeu_ps(p, (__m512)v); }
static inline float sum(vec v) { return _mm512_reduce_add_ps((__m512)v); }
static inline void store_as(uint16_t* p, vec v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, 0)); }
#include "paged_body.inc"
#undef LANES
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace {

enum Isa { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

Isa best_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq"))
        return kAvx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return kAvx2;
#endif
    return kBaseline;
}

template <typename T>
void dispatch(int isa, const Call& call, const NewTokens& fresh, const std::vector<Item>& items, int num_threads) {
#if defined(__x86_64__)
    if (isa == kAvx512) return avx512::run<T>(call, fresh, items, num_threads);
    if (isa == kAvx2) return avx2::run<T>(call, fresh, items, num_threads);
#endif
    baseline::run<T>(call, fresh, items, num_threads);
}

// Longest work first, so that threads end together.
std::vector<Item> split(const Call& call, int num_reqs, int num_threads) {
    const int group = call.num_heads / call.num_kv_heads;
    const int most = group < kMaxRows ? kMaxRows / group : 1;
    // A single query takes all heads together, if there are requests enough for all threads: a block's memory is then
    // read in one piece.
    const int together = num_reqs >= 2 * num_threads && call.num_heads <= kMaxRows ? call.num_kv_heads : 1;
    std::vector<Item> items;
    for (int request = 0; request < num_reqs; ++request) {
        const int query_len = call.starts[request + 1] - call.starts[request];
        const int num_heads = query_len == 1 ? together : 1;
        for (int first = 0; first < query_len; first += most)
            for (int head = 0; head < call.num_kv_heads; head += num_heads)
                items.push_back({request, head, num_heads, first, query_len - first < most ? query_len - first : most});
    }
    std::stable_sort(items.begin(), items.end(), [&](const Item& a, const Item& b) {
        return (int64_t)a.num_heads * a.num_queries * call.seq_lens[a.request] >
               (int64_t)b.num_heads * b.num_queries * call.seq_lens[b.request];
    });
    return items;
}

}  // namespace

#define SCHEDTOP_PUBLIC __attribute__((visibility("default")))

extern "C" {

// What this machine can do: 0 baseline, 1 AVX2, 2 AVX-512.
SCHEDTOP_PUBLIC int schedtop_best_isa() { return best_isa(); }

// Limits of the kernel, for the caller's checks.
SCHEDTOP_PUBLIC int schedtop_max_head_size() { return kMaxHeadSize; }
SCHEDTOP_PUBLIC int schedtop_max_group() { return kMaxRows; }

// Stores the new keys and values, then attends; see attention.py for the contract. `is_half`: the cache holds fp16.
SCHEDTOP_PUBLIC void schedtop_paged_attention(const float* q, const float* k, const float* v, float* out, void* keys, void* values,
                              const int64_t* slots, const int32_t* table, const int32_t* starts,
                              const int32_t* seq_lens, int64_t num_tokens, int64_t q_stride, int64_t k_stride,
                              int64_t v_stride, int64_t table_stride, int32_t num_reqs, int32_t num_heads,
                              int32_t num_kv_heads, int32_t head_size, int32_t block_size, int32_t window, float scale,
                              int32_t is_half, int32_t isa, int32_t num_threads) {
    const Call call{q, out, keys, values, table, starts, seq_lens, q_stride, table_stride, num_heads, num_kv_heads,
                    head_size, block_size, window, scale};
    const NewTokens fresh{k, v, slots, num_tokens, k_stride, v_stride};
    const std::vector<Item> items = split(call, num_reqs, num_threads);
    if (is_half)
        dispatch<uint16_t>(isa, call, fresh, items, num_threads);
    else
        dispatch<float>(isa, call, fresh, items, num_threads);
}
}
