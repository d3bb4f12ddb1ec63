//! Flat buffers: aligned, backed by pages of their own, recycled.
//!
//! A buffer is an anonymous mapping, so it is zero where nobody has written, and memory that is never written costs
//! nothing. It is lent out as a [`Lease`]; when the last holder lets go of one it returns to its [`Pool`], pages and
//! all, or is unmapped if the pool is gone.

use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use memmap2::{MmapMut, MmapOptions};

use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::param::{BufferSpec, SLOT_ALIGNMENT, Slot};
use crate::view::TensorView;

/// The size of a huge page on x86-64 and AArch64. Larger buffers start on such a boundary.
const HUGE_PAGE: usize = 2 << 20;

/// Invariants: `start + len * dtype.len_bytes()` lies within `map`, and `start` is at least 64-byte aligned.
pub(crate) struct Buffer {
    map: MmapMut,
    start: usize,
    dtype: DType,
    len: usize,
    /// The parameters whose slots may hold something else than zeros.
    touched: Vec<bool>,
    /// Whether the padding was handed over too, so that it may hold something else than zeros.
    padding_exposed: AtomicBool,
}

impl Buffer {
    /// Maps zeros. Pages become resident only where they are written.
    pub(crate) fn new(spec: BufferSpec) -> Result<Self> {
        let len_bytes = spec.len * spec.dtype.len_bytes();
        let memory = |error: std::io::Error| Error::Memory { len_bytes, reason: error.to_string() };
        let is_huge = len_bytes >= HUGE_PAGE;
        let slack = if is_huge { HUGE_PAGE } else { 0 };
        let map = MmapOptions::new().len(len_bytes.max(1) + slack).map_anon().map_err(memory)?;
        let alignment = if is_huge { HUGE_PAGE } else { SLOT_ALIGNMENT };
        let start = map.as_ptr().align_offset(alignment);
        #[cfg(target_os = "linux")]
        if is_huge {
            // A system without huge pages refuses, and then ordinary ones serve.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        Ok(Self {
            map,
            start,
            dtype: spec.dtype,
            len: spec.len,
            touched: Vec::new(),
            padding_exposed: AtomicBool::new(false),
        })
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements, padding included.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Where the elements start. No reference to them is made: whoever was handed them may be writing.
    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.map.as_ptr().wrapping_add(self.start)
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.map.as_mut_ptr().wrapping_add(self.start)
    }

    fn bytes(&self) -> &[u8] {
        &self.map[self.start..][..self.len * self.dtype.len_bytes()]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.map[self.start..][..self.len * self.dtype.len_bytes()]
    }

    /// The elements of a range, or pairs of them. Panics if the dtype is another.
    pub(crate) fn elements<T: Element>(&self, range: Range<usize>) -> &[T] {
        assert_eq!(T::DTYPE.component(), self.dtype);
        let size = self.dtype.len_bytes();
        bytemuck::cast_slice(&self.bytes()[range.start * size..range.end * size])
    }

    /// A view of the elements from `offset` on, in row-major order; of pairs of them, if the dtype is complex. Panics if
    /// they leave the buffer, or the dtype has other components.
    pub(crate) fn view(&self, offset: usize, shape: &[usize], dtype: DType) -> TensorView<'_> {
        let len = shape.iter().product::<usize>() * dtype.components();
        assert!(offset + len <= self.len && dtype.component() == self.dtype, "a view leaves its buffer");
        let start = self.as_ptr().wrapping_add(offset * self.dtype.len_bytes());
        // SAFETY: the elements lie within the mapping, by the assertion and the invariants, and it is borrowed for as
        // long as the view. Not guaranteed: that whoever was handed them does not write meanwhile.
        let view = unsafe { TensorView::from_raw_parts(start.cast(), dtype, shape, None) };
        view.expect("a buffer lies within the address space")
    }

    /// The bytes of a slot. Panics if it leaves the buffer.
    pub(crate) fn bytes_of(&self, slot: Slot) -> &[u8] {
        let size = self.dtype.len_bytes();
        &self.bytes()[slot.offset * size..][..slot.len * size]
    }

    /// As [`bytes_of`](Self::bytes_of), to be written.
    pub(crate) fn bytes_of_mut(&mut self, slot: Slot) -> &mut [u8] {
        let size = self.dtype.len_bytes();
        &mut self.bytes_mut()[slot.offset * size..][..slot.len * size]
    }

    pub(crate) fn fill_zero(&mut self, range: Range<usize>) {
        let size = self.dtype.len_bytes();
        self.bytes_mut()[range.start * size..range.end * size].fill(0);
    }

    /// Makes the slot of a parameter zeros; costs nothing if that is what it holds.
    pub(crate) fn clear(&mut self, param: usize, slot: Slot) {
        // Whoever was handed the whole buffer may have written anywhere.
        if self.is_touched(param) || *self.padding_exposed.get_mut() {
            self.fill_zero(slot.offset..slot.offset + slot.len);
        }
    }

    /// The addresses of its elements, from the first to the one after the last.
    pub(crate) fn span(&self) -> Range<usize> {
        let start = self.as_ptr().addr();
        start..start + self.len * self.dtype.len_bytes()
    }

    /// Notes that the slot of a parameter is about to be written.
    pub(crate) fn touch(&mut self, param: usize) {
        if self.touched.len() <= param {
            self.touched.resize(param + 1, false);
        }
        self.touched[param] = true;
    }

    pub(crate) fn is_touched(&self, param: usize) -> bool {
        self.touched.get(param).copied().unwrap_or(false)
    }

    pub(crate) fn untouch(&mut self, param: usize) {
        if let Some(touched) = self.touched.get_mut(param) {
            *touched = false;
        }
    }

    /// Notes that padding is about to be handed over.
    pub(crate) fn expose_padding(&self) {
        self.padding_exposed.store(true, Ordering::Relaxed);
    }

    /// Whether padding has been handed over since this was last asked.
    pub(crate) fn take_padding_exposed(&mut self) -> bool {
        std::mem::take(self.padding_exposed.get_mut())
    }
}

/// Where buffers wait to be used again, at most one for each of a layout's buffers.
pub(crate) struct Pool {
    places: Mutex<Vec<Place>>,
    /// The addresses of the buffers that are on loan.
    lent: Mutex<Vec<Range<usize>>>,
    mapped: AtomicU64,
}

struct Place {
    spec: BufferSpec,
    spare: Option<Buffer>,
}

impl Pool {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { places: Mutex::default(), lent: Mutex::default(), mapped: AtomicU64::new(0) })
    }

    /// Follows a layout that has grown. A spare buffer of another length is let go of.
    pub(crate) fn follow(&self, specs: &[BufferSpec]) {
        let mut places = self.lock();
        for (index, &spec) in specs.iter().enumerate() {
            match places.get_mut(index) {
                Some(place) if place.spec == spec => {}
                Some(place) => *place = Place { spec, spare: None },
                None => places.push(Place { spec, spare: None }),
            }
        }
    }

    /// The spare buffer of a number, holding what it held, or a new one.
    pub(crate) fn lease(self: &Arc<Self>, index: usize) -> Result<Lease> {
        let (spec, spare) = {
            let place = &mut self.lock()[index];
            (place.spec, place.spare.take())
        };
        let buffer = match spare {
            Some(buffer) => buffer,
            None => {
                self.mapped.fetch_add(1, Ordering::Relaxed);
                Buffer::new(spec)?
            }
        };
        self.lock_lent().push(buffer.span());
        Ok(Lease { buffer: Some(buffer), pool: Arc::downgrade(self), index })
    }

    /// Whether some of these addresses lie in a buffer that is on loan.
    pub(crate) fn has_lent(&self, span: &Range<usize>) -> bool {
        self.lock_lent().iter().any(|lent| overlap(lent, span))
    }

    fn lock_lent(&self) -> MutexGuard<'_, Vec<Range<usize>>> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many buffers were ever mapped: in a steady state it stands still.
    pub(crate) fn mapped(&self) -> u64 {
        self.mapped.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Place>> {
        // Nothing in here panics with the lock held and a place half changed.
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether two ranges have something in common.
pub(crate) fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

/// A buffer on loan: whoever drops it, on whatever thread, gives it back.
pub(crate) struct Lease {
    /// None only while it is being dropped.
    buffer: Option<Buffer>,
    pool: Weak<Pool>,
    index: usize,
}

impl Lease {
    /// Another buffer of the same kind.
    pub(crate) fn sibling(&self) -> Result<Self> {
        let spec = BufferSpec { dtype: self.dtype(), len: self.len() };
        match self.pool.upgrade() {
            // The layout may have grown since.
            Some(pool) if pool.lock()[self.index].spec == spec => pool.lease(self.index),
            _ => Self::unpooled(spec),
        }
    }

    /// A buffer of some of the elements, which belongs to no pool. Panics if they leave the buffer.
    pub(crate) fn copy(&self, offset: usize, len: usize) -> Result<Self> {
        assert!(offset + len <= self.len(), "a copy leaves its buffer");
        let mut copy = Self::unpooled(BufferSpec { dtype: self.dtype(), len })?;
        let size = self.dtype().len_bytes();
        // SAFETY: both ranges lie within their mappings, by the assertion and the invariants, and the new one is nobody
        // else's. Not guaranteed: that whoever was handed the elements does not write meanwhile.
        unsafe { copy.as_mut_ptr().copy_from_nonoverlapping(self.as_ptr().add(offset * size), len * size) };
        Ok(copy)
    }

    /// A buffer of these bytes, which belongs to no pool. Panics if they are no whole number of elements.
    pub(crate) fn of_bytes(bytes: &[u8], dtype: DType) -> Result<Self> {
        let len = bytes.len() / dtype.len_bytes();
        let mut copy = Self::unpooled(BufferSpec { dtype, len })?;
        copy.bytes_mut().copy_from_slice(bytes);
        Ok(copy)
    }

    fn unpooled(spec: BufferSpec) -> Result<Self> {
        Ok(Self { buffer: Some(Buffer::new(spec)?), pool: Weak::new(), index: 0 })
    }
}

impl Deref for Lease {
    type Target = Buffer;

    fn deref(&self) -> &Buffer {
        self.buffer.as_ref().expect("a lease holds its buffer until it is dropped")
    }
}

impl DerefMut for Lease {
    fn deref_mut(&mut self) -> &mut Buffer {
        self.buffer.as_mut().expect("a lease holds its buffer until it is dropped")
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let (Some(buffer), Some(pool)) = (self.buffer.take(), self.pool.upgrade()) else { return };
        // Before the memory may be somebody else's.
        let span = buffer.span();
        pool.lock_lent().retain(|lent| *lent != span);
        let mut places = pool.lock();
        let place = &mut places[self.index];
        if place.spare.is_none() && place.spec == (BufferSpec { dtype: buffer.dtype, len: buffer.len }) {
            place.spare = Some(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: BufferSpec = BufferSpec { dtype: DType::F32, len: 48 };

    fn pool() -> Arc<Pool> {
        let pool = Pool::new();
        pool.follow(&[SPEC]);
        pool
    }

    #[test]
    fn a_new_buffer_is_zero_and_aligned() {
        for len in [0, 1, 48, 1 << 19, (1 << 21) + 16] {
            let buffer = Buffer::new(BufferSpec { dtype: DType::F32, len }).unwrap();
            assert!(buffer.elements::<f32>(0..len).iter().all(|x| x.to_bits() == 0));
            let alignment = if len * 4 >= HUGE_PAGE { HUGE_PAGE } else { SLOT_ALIGNMENT };
            assert_eq!(buffer.as_ptr().addr() % alignment, 0);
        }
    }

    #[test]
    fn a_dropped_lease_is_lent_again_and_only_one_is_kept() {
        let pool = pool();
        let (first, second) = (pool.lease(0).unwrap(), pool.lease(0).unwrap());
        let address = first.as_ptr();
        drop(first);
        drop(second);
        assert_eq!(pool.lease(0).unwrap().as_ptr(), address);
        assert_eq!(pool.mapped(), 2);
    }

    #[test]
    fn a_lease_outlives_its_pool_and_is_dropped_on_another_thread() {
        let pool = pool();
        let lease = pool.lease(0).unwrap();
        drop(pool);
        std::thread::spawn(move || assert_eq!(lease.sibling().unwrap().len(), 48)).join().unwrap();
    }

    #[test]
    fn what_is_on_loan_is_known_until_it_is_back() {
        let pool = pool();
        let (first, second) = (pool.lease(0).unwrap(), pool.lease(0).unwrap());
        let spans = [first.span(), second.span()];
        assert!(spans.iter().all(|span| pool.has_lent(&(span.end - 1..span.end))));
        assert!(!pool.has_lent(&(spans[0].start..spans[0].start)));
        drop(first);
        assert_eq!(spans.each_ref().map(|span| pool.has_lent(span)), [false, true]);
    }

    #[test]
    fn a_buffer_of_an_outgrown_layout_is_not_kept() {
        let pool = pool();
        let lease = pool.lease(0).unwrap();
        pool.follow(&[BufferSpec { dtype: DType::F32, len: 64 }]);
        drop(lease);
        assert_eq!(pool.lease(0).unwrap().len(), 64);
    }
}
