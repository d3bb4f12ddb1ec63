//! Somebody else's tensor, looked at without copying it: dense, with any strides, or some rows of one.

mod rows;
mod walk;

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Range;

use smallvec::SmallVec;

pub(crate) use rows::Rows;
use walk::Walk;
pub(crate) use walk::{Tile, Tiling};

use crate::dtype::{DType, Element};
use crate::error::TensorError;
use crate::param::{Shape, element_count};

/// Pointer, dtype, shape and strides of a tensor that lives elsewhere, in host memory.
///
/// It borrows: nothing is copied, nothing is freed. Elements are read by logical index, whatever their order in
/// memory, and need not be aligned. It may also be given by some of its rows ([`from_rows`](Self::from_rows)).
#[derive(Clone, Debug)]
pub struct TensorView<'a> {
    data: *const u8,
    dtype: DType,
    shape: Shape,
    /// Of components: two for each complex number.
    len: usize,
    order: Order<'a>,
    memory: PhantomData<&'a [u8]>,
}

/// How components are found in logical order.
#[derive(Clone, Debug)]
enum Order<'a> {
    /// That is their order in memory, without gaps.
    RowMajor,
    Strided(Box<Walk>),
    /// There is no memory but that of some rows; the others are zero.
    Rows(Box<Rows<'a>>),
}

// SAFETY: a view only reads, like the `&'a [u8]` it stands for. Established by the contract of `from_raw_parts`: the
// memory is readable for 'a. Not guaranteed: that the owner leaves the elements alone meanwhile (see there).
unsafe impl Send for TensorView<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for TensorView<'_> {}

impl<'a> TensorView<'a> {
    /// A view of a slice in row-major order.
    ///
    /// # Errors
    /// [`TensorError::Malformed`] if the shape has another number of elements than the slice.
    ///
    /// ```
    /// # use gradacc::TensorView;
    /// let view = TensorView::from_slice(&[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3])?;
    /// assert_eq!(view.shape(), [2, 3]);
    /// # Ok::<(), gradacc::TensorError>(())
    /// ```
    pub fn from_slice<T: Element>(elements: &'a [T], shape: &[usize]) -> Result<Self, TensorError> {
        if element_count(shape) != Some(elements.len()) {
            let reason = format!("a slice of {} elements has not the shape {shape:?}", elements.len());
            return Err(TensorError::Malformed(reason));
        }
        Ok(Self {
            data: elements.as_ptr().cast(),
            dtype: T::DTYPE,
            shape: shape.into(),
            len: elements.len() * T::DTYPE.components(),
            order: Order::RowMajor,
            memory: PhantomData,
        })
    }

    /// A view of any strided tensor. Strides count elements, may be zero or negative, and mean nothing where the size
    /// is 1; None stands for row-major order.
    ///
    /// # Errors
    /// [`TensorError::Malformed`] if strides and shape differ in length, or the size exceeds the address space.
    ///
    /// # Safety
    /// Every element that shape and strides reach from `data` lies in one allocation that is readable for `'a`;
    /// `data` itself may be anything if there is no element. If another thread writes elements while they are read,
    /// the values read are unspecified, but nothing else is: they are read by raw pointer, never by reference.
    pub unsafe fn from_raw_parts(
        data: *const c_void,
        dtype: DType,
        shape: &[usize],
        strides: Option<&[isize]>,
    ) -> Result<Self, TensorError> {
        let count = element_count(shape)
            .filter(|count| count.checked_mul(dtype.len_bytes()).is_some_and(|bytes| bytes <= isize::MAX as usize))
            .ok_or_else(|| TensorError::Malformed(format!("a tensor of shape {shape:?} exceeds the address space")))?;
        let walk = match strides {
            Some(strides) if strides.len() != shape.len() => {
                return Err(TensorError::Malformed(format!("{} strides for shape {shape:?}", strides.len())));
            }
            Some(strides) if count > 0 && dtype.is_complex() => {
                let doubled: Option<SmallVec<[isize; 4]>> =
                    strides.iter().map(|stride| stride.checked_mul(2)).chain([Some(1)]).collect();
                let doubled = doubled.ok_or_else(|| TensorError::Malformed(format!("strides {strides:?}")))?;
                Walk::new(&[shape, &[2]].concat(), &doubled)
            }
            Some(strides) if count > 0 => Walk::new(shape, strides),
            _ => None,
        };
        let order = walk.map_or(Order::RowMajor, |walk| Order::Strided(Box::new(walk)));
        let len = count * dtype.components();
        Ok(Self { data: data.cast(), dtype, shape: shape.into(), len, order, memory: PhantomData })
    }

    /// A tensor that is zero but in some rows, as the gradient of an embedding is. `values` are those rows: its first
    /// dimension counts them, and the others are the last ones of `shape`. `rows` says where each belongs, counted in
    /// row-major order over the first dimensions of `shape`. A row that is given several times counts as their sum.
    ///
    /// # Errors
    /// [`TensorError::Malformed`] if shapes do not fit each other, or a row lies outside.
    ///
    /// ```
    /// # use gradacc::TensorView;
    /// let values = TensorView::from_slice(&[1.0_f32, 2.0, 3.0, 4.0], &[2, 2])?;
    /// let view = TensorView::from_rows(vec![7, 7], values, &[10, 2])?;
    /// assert_eq!(view.shape(), [10, 2]);
    /// # Ok::<(), gradacc::TensorError>(())
    /// ```
    pub fn from_rows(rows: Vec<usize>, values: TensorView<'a>, shape: &[usize]) -> Result<Self, TensorError> {
        let (dtype, data) = (values.dtype, values.data);
        let len = element_count(shape).and_then(|count| count.checked_mul(dtype.components()));
        let len = len
            .ok_or_else(|| TensorError::Malformed(format!("a tensor of shape {shape:?} exceeds the address space")))?;
        let order = Order::Rows(Box::new(Rows::new(rows, values, shape)?));
        Ok(Self { data, dtype, shape: shape.into(), len, order, memory: PhantomData })
    }

    /// Looks at other memory from now on, with the same dtype, shape and strides. Panics if it is given by rows.
    ///
    /// # Safety
    /// As for [`from_raw_parts`](Self::from_raw_parts), for the lifetime this view has.
    pub unsafe fn set_data(&mut self, data: *const c_void) {
        assert!(!matches!(self.order, Order::Rows(_)), "rows have memory of their own");
        self.data = data.cast();
    }

    /// Its dtype.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Its shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len / self.dtype.components()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its elements in row-major order, in the byte order of this machine, copied. Panics if it is given by rows.
    pub fn to_bytes(&self) -> Vec<u8> {
        fn components<S: bytemuck::Pod>(view: &TensorView<'_>) -> Vec<u8> {
            let mut components = vec![S::zeroed(); view.len];
            // SAFETY: of the size that `to_bytes` has looked up, and as many as there are.
            unsafe { view.gather(0, &raw mut components[..]) };
            bytemuck::cast_slice(&components).to_vec()
        }
        match self.dtype.component().len_bytes() {
            2 => components::<u16>(self),
            4 => components::<u32>(self),
            _ => components::<u64>(self),
        }
    }

    /// The rows, if it is given by them.
    pub(crate) fn rows(&self) -> Option<&Rows<'a>> {
        match &self.order {
            Order::Rows(rows) => Some(rows),
            _ => None,
        }
    }

    /// Number of components: of elements, or of parts of complex ones.
    pub(crate) fn component_count(&self) -> usize {
        self.len
    }

    /// Number of components that lie in memory.
    pub(crate) fn stored_count(&self) -> usize {
        self.rows().map_or(self.len, |rows| rows.values.len)
    }

    /// The components, if they lie in row-major order without gaps.
    pub(crate) fn contiguous(&self) -> Option<*const u8> {
        matches!(self.order, Order::RowMajor).then_some(self.data)
    }

    /// How rows and columns lie, if it is better read in tiles than in logical order.
    pub(crate) fn tiling(&self) -> Option<Tiling> {
        match &self.order {
            Order::Strided(walk) => walk.tiling(),
            _ => None,
        }
    }

    /// The addresses it may read, from the first to the one after the last.
    pub(crate) fn span(&self) -> Range<usize> {
        let (size, start) = (self.dtype.component().len_bytes(), self.data.addr());
        let (before, after) = match &self.order {
            _ if self.len == 0 => return start..start,
            Order::RowMajor => (0, self.len),
            Order::Strided(walk) => walk.reach(),
            Order::Rows(rows) => return rows.values.span(),
        };
        start.wrapping_sub(before * size)..start.wrapping_add(after * size)
    }

    /// Copies the components from logical index `start` on into `out`. Panics if it is given by rows.
    ///
    /// # Safety
    /// `S` has the size of a component, `start + out.len()` is at most their number, and `out` is writable.
    pub(crate) unsafe fn gather<S: Copy>(&self, start: usize, out: *mut [S]) {
        debug_assert_eq!(size_of::<S>(), self.dtype.component().len_bytes());
        let data = self.data.cast::<S>();
        match &self.order {
            // SAFETY: contiguous, and in bounds by this function's contract.
            Order::RowMajor => unsafe { std::ptr::copy_nonoverlapping(data.add(start), out.cast(), out.len()) },
            // SAFETY: the walk was made for this memory; the rest is this function's contract.
            Order::Strided(walk) => unsafe { walk.gather(data, start, out) },
            Order::Rows(_) => panic!("rows are not read in logical order"),
        }
    }

    /// Copies a tile of a view that has a [`tiling`](Self::tiling) into `out`, row by row, `out_stride` apart.
    ///
    /// # Safety
    /// `S` has the size of a component. The tile lies within the tensor, its rows within one group of
    /// [`Tiling::rows`], and `out` is writable for it.
    pub(crate) unsafe fn gather_tile<S: Copy>(&self, tile: &Tile, out: *mut S, out_stride: usize) {
        debug_assert_eq!(size_of::<S>(), self.dtype.component().len_bytes());
        let Order::Strided(walk) = &self.order else { panic!("only strided tensors have tiles") };
        // SAFETY: the walk was made for this memory; the rest is this function's contract.
        unsafe { walk.gather_tile(self.data.cast::<S>(), tile, out, out_stride) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The elements in logical order, each found by its index alone.
    fn naive(data: &[f32], origin: usize, shape: &[usize], strides: &[isize]) -> Vec<f32> {
        let count = shape.iter().product();
        let element = |mut i: usize| {
            let mut offset = origin as isize;
            for (&size, &stride) in shape.iter().zip(strides).rev() {
                offset += (i % size) as isize * stride;
                i /= size;
            }
            data[offset as usize]
        };
        (0..count).map(element).collect()
    }

    #[test]
    fn elements_are_read_in_logical_order_from_any_start() {
        let data: Vec<f32> = (0..240).map(|i| i as f32).collect();
        let cases: &[(usize, &[usize], &[isize])] = &[
            (0, &[4, 5, 6], &[30, 6, 1]),
            (0, &[6, 5, 4], &[1, 6, 30]),
            (0, &[5, 3], &[12, 2]),
            (239, &[240], &[-1]),
            (100, &[3, 7], &[0, -2]),
            (7, &[3, 4], &[0, 0]),
            (0, &[2, 4, 3, 5], &[60, 1, 20, 4]),
            (3, &[1, 9, 1], &[-7, 1, 999]),
            (3, &[1, 9, 1], &[-7, 5, 999]),
            (5, &[], &[]),
        ];
        for &(origin, shape, strides) in cases {
            // SAFETY: every case stays within `data`.
            let view = unsafe {
                let start = data.as_ptr().add(origin).cast();
                TensorView::from_raw_parts(start, DType::F32, shape, Some(strides)).unwrap()
            };
            let expected = naive(&data, origin, shape, strides);
            for start in 0..expected.len() {
                for len in [1, 2, 7, expected.len()].map(|len| len.min(expected.len() - start)) {
                    let mut out = vec![f32::NAN; len];
                    // SAFETY: `f32` is the dtype, and `start + len` is in bounds.
                    unsafe { view.gather(start, &raw mut out[..]) };
                    assert_eq!(out, expected[start..start + len], "{shape:?} {strides:?} from {start}");
                }
            }
        }
    }

    #[test]
    fn shapes_that_make_no_sense() {
        assert!(TensorView::from_slice(&[1.0_f32; 6], &[2, 2]).is_err());
        // SAFETY: both are refused before anything is read.
        unsafe {
            let null = std::ptr::null();
            assert!(TensorView::from_raw_parts(null, DType::F32, &[1 << 40, 1 << 40], None).is_err());
            assert!(TensorView::from_raw_parts(null, DType::F32, &[2, 2], Some(&[1])).is_err());
        }
    }
}
