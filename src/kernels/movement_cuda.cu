// Moving data on a GPU: fill, arange, and strided copies that convert.
//
// out[out_strides . i + out_offset] = convert(a[a_strides . i + a_offset]). Data of one dtype is
// moved by its size alone. A transposing copy goes through a tile in shared memory, so that reads
// and writes are both coalesced.
#include "../common/cuda_util.cuh"

namespace needle::NEEDLE_DEVICE {
namespace {

template <class T>
__global__ void fill_kernel(T* out, T value, int64_t n) {
  for (int64_t i = first_index(); i < n; i += index_step()) out[i] = value;
}

template <class T>
__global__ void arange_kernel(T* out, int64_t n) {
  for (int64_t i = first_index(); i < n; i += index_step()) out[i] = convert<T>(i);
}

template <class T>
__global__ void strided_fill_kernel(T* out, T value, Walk<1> walk, int64_t n) {
  for (int64_t i = first_index(); i < n; i += index_step()) out[walk(i).of[0]] = value;
}

// N elements on their way, and where to.
template <class T, int N>
struct Moved {
  Vec<T, N> value;
  int64_t to;
};
template <int N, class T>
__device__ Moved<T, N> fetch(const T* a, const Walk<2>& walk, int64_t i) {
  const auto at = walk(i);
  const T* const from = a + at.of[0];
  if (!walk.broadcasts(0)) return {*reinterpret_cast<const Vec<T, N>*>(from), at.of[1]};
  Moved<T, N> moved;
#pragma unroll
  for (int j = 0; j < N; ++j) moved.value.v[j] = *from;
  moved.to = at.of[1];
  return moved;
}

// In vectors of N elements, n of them.
template <class B, int N>
__global__ void strided_copy_kernel(const B* a, B* out, Walk<2> walk, int64_t n) {
  in_groups(
      first_index(), index_step(), n, [&](int64_t i) { return fetch<N>(a, walk, i); },
      [&](int64_t, const Moved<B, N>& moved) {
        *reinterpret_cast<Vec<B, N>*>(out + moved.to) = moved.value;
      });
}

// A batch of (rows, cols) matrices whose columns are contiguous in `out` and whose rows are
// contiguous in `a`.
constexpr int kTile = 32, kTileRows = 8;
template <class B>
__global__ void transpose_copy_kernel(const B* a, B* out, Walk<2> batch, int64_t batches,
                                      int64_t rows, int64_t cols, int64_t a_col_stride,
                                      int64_t out_row_stride) {
  NEEDLE_SHARED(B, tile, kTile, kTile + 1);
  const int64_t row_tiles = ceil_div(rows, kTile), col_tiles = ceil_div(cols, kTile);
  const int lane = int(threadIdx.x) % kTile, line = int(threadIdx.x) / kTile;
  for (int64_t t = blockIdx.x; t < batches * row_tiles * col_tiles; t += gridDim.x) {
    const auto at = batch(t / (row_tiles * col_tiles));
    const int64_t row0 = t / col_tiles % row_tiles * kTile, col0 = t % col_tiles * kTile;
    for (int j = line; j < kTile; j += kTileRows)
      if (row0 + lane < rows && col0 + j < cols)
        tile[j][lane] = a[at.of[0] + (col0 + j) * a_col_stride + row0 + lane];
    __syncthreads();
    for (int i = line; i < kTile; i += kTileRows)
      if (row0 + i < rows && col0 + lane < cols)
        out[at.of[1] + (row0 + i) * out_row_stride + col0 + lane] = tile[lane][i];
    __syncthreads();
  }
}

template <class From, class To, int N>
__global__ void convert_copy_kernel(const From* a, To* out, Walk<2> walk, int64_t n) {
  in_groups(
      first_index(), index_step(), n, [&](int64_t i) { return fetch<N>(a, walk, i); },
      [&](int64_t, const Moved<From, N>& moved) {
        Vec<To, N> converted;
#pragma unroll
        for (int j = 0; j < N; ++j) converted.v[j] = convert<To>(moved.value.v[j]);
        *reinterpret_cast<Vec<To, N>*>(out + moved.to) = converted;
      });
}

// The walk by vectors of N elements where both operands have them and nothing is left over.
template <int N, class From, class To>
bool copy_by_vectors(Walk<2>& walk, const From* a, const To* out, int64_t n) {
  return n % N == 0 && go_by_vectors(walk, N,
                                     {aligned_for<Vec<From, N>>(a + walk.offset[0]),
                                      aligned_for<Vec<To, N>>(out + walk.offset[1])});
}

// Copies by tiles when the last dimension of `out` is contiguous and another dimension is
// contiguous in `a`.
template <class B>
bool transpose_copy(const B* a, B* out, const Walk<2>& walk, int64_t n) {
  const int last = walk.ndim - 1;
  if (walk.ndim < 2 || walk.strides[1][last] != 1 || walk.strides[0][last] == 1 ||
      walk.shape[last] < 8)
    return false;
  int row_dim = -1;
  for (int d = 0; d < last; ++d)
    if (walk.strides[0][d] == 1 && walk.shape[d] >= 8) row_dim = d;
  if (row_dim < 0) return false;
  Dims batch_shape, a_strides, out_strides;
  for (int d = 0; d < last; ++d) {
    if (d == row_dim) continue;
    batch_shape.push_back(walk.shape[d]);
    a_strides.push_back(walk.strides[0][d]);
    out_strides.push_back(walk.strides[1][d]);
  }
  const int64_t rows = walk.shape[row_dim], cols = walk.shape[last], batches = n / (rows * cols);
  const auto batch =
      make_walk<2>(batch_shape, {{&a_strides, walk.offset[0]}, {&out_strides, walk.offset[1]}});
  const int64_t tiles = batches * ceil_div(rows, kTile) * ceil_div(cols, kTile);
  launch<transpose_copy_kernel<B>>(grid_of(blocks_for(tiles), kTile * kTileRows), a, out, batch,
                                   batches, rows, cols, walk.strides[0][last],
                                   walk.strides[1][row_dim]);
  return true;
}

}  // namespace

// Of one kernel for all: every file is compiled for the same GPUs.
cudaError_t ask_code_capability(int& capability) {
  cudaFuncAttributes attributes{};
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(fill_kernel<uint8_t>));
  capability = attributes.ptxVersion;
  return error;
}

void fill(const Array& out, Scalar value) {
  dispatch_any(out.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch<fill_kernel<T>>(grid_stride(out.size()), out.data<T>(), value.to<T>(), out.size());
  });
}

void arange(const Array& out) {
  dispatch_any(out.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch<arange_kernel<T>>(grid_stride(out.size()), out.data<T>(), out.size());
  });
}

void strided_copy(const Array& a, const Dims& a_strides, int64_t a_offset, const Array& out,
                  const Dims& out_strides, int64_t out_offset, const Dims& shape) {
  const int64_t n = size_of(shape);
  auto walk = make_walk<2>(shape, {{&a_strides, a_offset}, {&out_strides, out_offset}});
  if (a.dtype() == out.dtype()) {
    dispatch_bytes(dtype_size(out.dtype()), [&](auto tag) {
      using B = typename decltype(tag)::type;
      const B* source = static_cast<const B*>(a.ptr());
      B* target = static_cast<B*>(out.ptr());
      const bool flat =
          walk.ndim == 0 || (walk.ndim == 1 && walk.strides[0][0] == 1 && walk.strides[1][0] == 1);
      if (flat) {
        copy_on_device(target + out_offset, source + a_offset, n * int64_t(sizeof(B)));
      } else if (!transpose_copy(source, target, walk, n)) {
        constexpr int N = 16 / int(sizeof(B));
        if (copy_by_vectors<N>(walk, source, target, n))
          launch<strided_copy_kernel<B, N>>(grid_stride(n / N), source, target, walk, n / N);
        else
          launch<strided_copy_kernel<B, 1>>(grid_stride(n), source, target, walk, n);
      }
    });
    return;
  }
  dispatch_any(a.dtype(), [&](auto from) {
    dispatch_any(out.dtype(), [&](auto to) {
      using From = typename decltype(from)::type;
      using To = typename decltype(to)::type;
      if constexpr (!std::is_same<From, To>::value) {
        const From* source = a.data<From>();
        To* target = out.data<To>();
        if constexpr (std::is_floating_point<accum_t<From>>::value &&
                      std::is_floating_point<accum_t<To>>::value) {  // others are too rare for it
          constexpr int N = 16 / int(std::max(sizeof(From), sizeof(To)));
          if (copy_by_vectors<N>(walk, source, target, n))
            return launch<convert_copy_kernel<From, To, N>>(grid_stride(n / N), source, target,
                                                            walk, n / N);
        }
        launch<convert_copy_kernel<From, To, 1>>(grid_stride(n), source, target, walk, n);
      }
    });
  });
}

void strided_fill(const Array& out, const Dims& strides, int64_t offset, const Dims& shape,
                  Scalar value) {
  const int64_t n = size_of(shape);
  const auto walk = make_walk<1>(shape, {{&strides, offset}});
  dispatch_any(out.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch<strided_fill_kernel<T>>(grid_stride(n), out.data<T>(), value.to<T>(), walk, n);
  });
}

}  // namespace needle::NEEDLE_DEVICE
