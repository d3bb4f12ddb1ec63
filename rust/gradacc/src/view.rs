//! Somebody else's tensor, looked at without copying it.

use std::ffi::c_void;
use std::marker::PhantomData;

use smallvec::SmallVec;

use crate::dtype::{DType, Element};
use crate::error::TensorError;
use crate::param::{Shape, element_count};

/// Pointer, dtype, shape and strides of a tensor that lives elsewhere, in host memory.
///
/// It borrows: nothing is copied, nothing is freed. Elements are read by logical index, whatever their order in
/// memory, and need not be aligned.
#[derive(Clone, Debug)]
pub struct TensorView<'a> {
    data: *const u8,
    dtype: DType,
    shape: Shape,
    len: usize,
    /// How to walk the elements in logical order; None if that is their order in memory, without gaps.
    walk: Option<Box<Walk>>,
    memory: PhantomData<&'a [u8]>,
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
            len: elements.len(),
            walk: None,
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
        let len = element_count(shape)
            .filter(|len| len.checked_mul(dtype.len_bytes()).is_some_and(|bytes| bytes <= isize::MAX as usize))
            .ok_or_else(|| TensorError::Malformed(format!("a tensor of shape {shape:?} exceeds the address space")))?;
        let walk = match strides {
            Some(strides) if strides.len() != shape.len() => {
                return Err(TensorError::Malformed(format!("{} strides for shape {shape:?}", strides.len())));
            }
            Some(strides) if len > 0 => Walk::new(shape, strides).map(Box::new),
            _ => None,
        };
        Ok(Self { data: data.cast(), dtype, shape: shape.into(), len, walk, memory: PhantomData })
    }

    /// Looks at other memory from now on, with the same dtype, shape and strides.
    ///
    /// # Safety
    /// As for [`from_raw_parts`](Self::from_raw_parts), for the lifetime this view has.
    pub unsafe fn set_data(&mut self, data: *const c_void) {
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
        self.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements, if they lie in row-major order without gaps.
    pub(crate) fn contiguous(&self) -> Option<*const u8> {
        self.walk.is_none().then_some(self.data)
    }

    /// Copies the elements from logical index `start` on into `out`.
    ///
    /// # Safety
    /// `S` has the size of the dtype, `start + out.len()` is at most `len`, and `out` is writable.
    pub(crate) unsafe fn gather<S: Copy>(&self, start: usize, out: *mut [S]) {
        debug_assert_eq!(size_of::<S>(), self.dtype.len_bytes());
        let data = self.data.cast::<S>();
        match &self.walk {
            // SAFETY: contiguous, and in bounds by this function's contract.
            None => unsafe { std::ptr::copy_nonoverlapping(data.add(start), out.cast(), out.len()) },
            // SAFETY: the walk was made for this memory; the rest is this function's contract.
            Some(walk) => unsafe { walk.gather(data, start, out) },
        }
    }
}

/// The dimensions of a tensor from the outermost to the innermost, as (size, stride in elements), after those of size
/// 1 are dropped and those that are one run in memory are merged.
#[derive(Clone, Debug, PartialEq)]
struct Walk(SmallVec<[(usize, isize); 4]>);

impl Walk {
    /// None if the walk is one contiguous run. There is no dimension of size 0.
    fn new(shape: &[usize], strides: &[isize]) -> Option<Self> {
        let mut dimensions: SmallVec<[(usize, isize); 4]> = SmallVec::new();
        for (&size, &stride) in shape.iter().zip(strides).filter(|&(&size, _)| size > 1) {
            match dimensions.last_mut() {
                Some(outer) if Some(outer.1) == stride.checked_mul(size as isize) => {
                    *outer = (outer.0 * size, stride);
                }
                _ => dimensions.push((size, stride)),
            }
        }
        match dimensions[..] {
            [] | [(_, 1)] => None,
            _ => Some(Self(dimensions)),
        }
    }

    /// # Safety
    /// As for [`TensorView::gather`], `data` being the tensor this walk was made for.
    unsafe fn gather<S: Copy>(&self, data: *const S, start: usize, out: *mut [S]) {
        let (&(inner_size, inner_stride), outer) = self.0.split_last().expect("a walk has a dimension");
        let mut position: SmallVec<[usize; 4]> = SmallVec::from_elem(0, outer.len());
        let (mut row, mut column) = (start / inner_size, start % inner_size);
        for (axis, &(size, _)) in outer.iter().enumerate().rev() {
            (position[axis], row) = (row % size, row / size);
        }
        let (len, out) = (out.len(), out.cast::<S>());
        let mut done = 0;
        while done < len {
            let row: isize = outer.iter().zip(&position).map(|(&(_, stride), &i)| i as isize * stride).sum();
            let run = (inner_size - column).min(len - done);
            for i in 0..run {
                let offset = row + (column + i) as isize * inner_stride;
                // SAFETY: (position, column + i) is an index within the shape, so its element is readable by the
                // contract of `from_raw_parts`; done + i < len, so the target is writable by this function's.
                unsafe { out.add(done + i).write(data.offset(offset).read_unaligned()) };
            }
            done += run;
            column = 0;
            for (axis, &(size, _)) in outer.iter().enumerate().rev() {
                position[axis] += 1;
                if position[axis] < size {
                    break;
                }
                position[axis] = 0;
            }
        }
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
    fn a_run_in_memory_is_recognised() {
        let runs: &[(&[usize], &[isize])] =
            &[(&[4, 6], &[6, 1]), (&[1, 10], &[-7, 1]), (&[8, 15, 1, 1], &[15, 1, 1, 1]), (&[1, 1], &[5, 9])];
        for (shape, strides) in runs {
            assert_eq!(Walk::new(shape, strides), None, "{shape:?} {strides:?}");
        }
        assert_eq!(Walk::new(&[3, 4, 5], &[40, 10, 2]), Some(Walk(smallvec::smallvec![(60, 2)])));
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
