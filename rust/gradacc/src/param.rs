//! Parameters and where their sums lie.

use std::fmt;

use indexmap::IndexMap;
use smallvec::SmallVec;

use crate::dtype::DType;
use crate::error::{Error, Result, TensorError};

/// Sizes of a tensor's dimensions, outermost first.
pub type Shape = SmallVec<[usize; 4]>;

/// Every parameter starts on a boundary of so many bytes: a cache line, and the widest vector register.
pub const SLOT_ALIGNMENT: usize = 64;

/// The key of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub u64);

impl fmt::Display for ParamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What an accumulator knows of a parameter: never its values.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Its key.
    pub id: ParamId,
    /// What messages call it.
    pub name: String,
    /// Its shape; gradients must have exactly this one.
    pub shape: Shape,
    /// Its dtype, which decides the dtype of its sums unless the accumulator is told another. Its gradients are complex
    /// if it is, and only then.
    pub dtype: DType,
}

impl ParamSpec {
    /// A parameter that messages call by its id.
    pub fn new(id: ParamId, shape: &[usize], dtype: DType) -> Self {
        Self { id, name: id.to_string(), shape: shape.into(), dtype }
    }
}

/// Where one parameter's sums lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Which of the layout's buffers.
    pub buffer: usize,
    /// Elements from the buffer's start; a multiple of [`SLOT_ALIGNMENT`] in bytes.
    pub offset: usize,
    /// Number of the buffer's elements: two for each complex number.
    pub len: usize,
}

/// One flat buffer of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferSpec {
    /// The dtype of its sums.
    pub dtype: DType,
    /// Number of elements, padding included.
    pub len: usize,
}

/// The fixed map from parameter to shape, dtype and place.
///
/// Parameters are numbered in the order they were registered in, and those numbers index everything else. A
/// parameter once placed never moves, and in each buffer offsets ascend with the number.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Layout {
    params: IndexMap<ParamId, ParamSpec>,
    slots: Vec<Slot>,
    buffers: Vec<BufferSpec>,
}

impl Layout {
    /// Number of parameters.
    pub fn len(&self) -> usize {
        self.params.len()
    }

    /// Whether there is no parameter.
    pub fn is_empty(&self) -> bool {
        self.params.is_empty()
    }

    /// The number of a parameter.
    pub fn index_of(&self, id: ParamId) -> Option<usize> {
        self.params.get_index_of(&id)
    }

    /// The parameter of a number. Panics if there is none.
    pub fn spec(&self, index: usize) -> &ParamSpec {
        &self.params[index]
    }

    /// Where the parameter of a number lies. Panics if there is none.
    pub fn slot(&self, index: usize) -> Slot {
        self.slots[index]
    }

    /// The dtype that a parameter's gradients are summed and handed over in. Panics if there is no such parameter.
    pub fn sums_dtype(&self, index: usize) -> DType {
        let sums = self.buffers[self.slots[index].buffer].dtype.of_components(self.params[index].dtype.is_complex());
        sums.expect("a parameter lies in a buffer that takes it")
    }

    /// Whether a gradient of this shape and dtype can be added to a parameter. Panics if there is no such parameter.
    ///
    /// # Errors
    /// [`TensorError::Shape`] or [`TensorError::Dtype`] of the parameter.
    pub fn check(&self, index: usize, shape: &[usize], dtype: DType) -> Result<()> {
        let spec = &self.params[index];
        // Compared one by one: most shapes are too short to be worth a call of memcmp.
        if !shape.iter().eq(&spec.shape) {
            let (expected, got) = (spec.shape.as_slice().into(), shape.into());
            return Err(TensorError::Shape { expected, got }.of(&spec.name));
        }
        let sums = self.buffers[self.slots[index].buffer].dtype;
        let is_complex = spec.dtype.is_complex();
        if is_complex != dtype.is_complex() || !sums.takes(dtype.component()) {
            let (accepted, got) = (sums.accepted(is_complex), dtype.to_string());
            return Err(TensorError::Dtype { accepted, got }.of(&spec.name));
        }
        Ok(())
    }

    /// The flat buffers.
    pub fn buffers(&self) -> &[BufferSpec] {
        &self.buffers
    }

    /// Bytes of all buffers, padding included.
    pub fn len_bytes(&self) -> usize {
        self.buffers.iter().map(|buffer| buffer.len * buffer.dtype.len_bytes()).sum()
    }

    /// Places a parameter behind the last one of the same accumulation dtype, in a buffer that `may_grow`, or else
    /// in a new one. Returns its number.
    pub(crate) fn push(
        &mut self,
        spec: ParamSpec,
        accumulation: DType,
        may_grow: impl Fn(usize) -> bool,
    ) -> Result<usize> {
        if self.params.contains_key(&spec.id) {
            return Err(Error::DuplicateParameter { parameter: spec.name });
        }
        let sums = accumulation.of_components(spec.dtype.is_complex());
        if sums.is_none() || !accumulation.takes(spec.dtype) {
            let accepted = accumulation.accepted(false);
            return Err(TensorError::Dtype { accepted, got: spec.dtype.to_string() }.of(spec.name));
        }
        let too_large = || TensorError::Malformed("its sums exceed the address space".into()).of(spec.name.clone());
        let len = element_count(&spec.shape)
            .and_then(|count| count.checked_mul(spec.dtype.components()))
            .ok_or_else(too_large)?;
        let reusable = |&(index, buffer): &(usize, &BufferSpec)| buffer.dtype == accumulation && may_grow(index);
        let buffer = self.buffers.iter().enumerate().rev().find(reusable).map(|(index, _)| index);
        let offset = buffer.map_or(0, |buffer| self.buffers[buffer].len);
        let per_slot = SLOT_ALIGNMENT / accumulation.len_bytes();
        let end = len
            .checked_next_multiple_of(per_slot)
            .and_then(|padded| padded.checked_add(offset))
            .filter(|end| end.checked_mul(accumulation.len_bytes()).is_some_and(|bytes| bytes <= isize::MAX as usize))
            .ok_or_else(too_large)?;
        let buffer = buffer.unwrap_or_else(|| {
            self.buffers.push(BufferSpec { dtype: accumulation, len: 0 });
            self.buffers.len() - 1
        });
        self.buffers[buffer].len = end;
        self.params.insert(spec.id, spec);
        self.slots.push(Slot { buffer, offset, len });
        Ok(self.slots.len() - 1)
    }
}

/// The number of elements of a shape; None if no `usize` holds it.
pub(crate) fn element_count(shape: &[usize]) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1usize, |count, &size| count.checked_mul(size))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(specs: &[(u64, &[usize], DType)]) -> Layout {
        let mut layout = Layout::default();
        for &(id, shape, dtype) in specs {
            layout.push(ParamSpec::new(ParamId(id), shape, dtype), dtype.accumulation(), |_| true).unwrap();
        }
        layout
    }

    #[test]
    fn parameters_of_one_accumulation_dtype_share_a_buffer_on_64_byte_boundaries() {
        let layout = layout(&[
            (7, &[3, 5], DType::BF16),
            (2, &[], DType::F64),
            (3, &[16], DType::F32),
            (4, &[4, 0], DType::F16),
            (5, &[1], DType::F32),
        ]);
        let slots: Vec<_> = (0..5).map(|i| layout.slot(i)).map(|s| (s.buffer, s.offset, s.len)).collect();
        assert_eq!(slots, [(0, 0, 15), (1, 0, 1), (0, 16, 16), (0, 32, 0), (0, 32, 1)]);
        assert_eq!(layout.len_bytes(), 48 * 4 + 8 * 8);
        assert_eq!(layout.index_of(ParamId(3)), Some(2));
    }

    #[test]
    fn a_buffer_that_may_not_grow_gets_a_successor() {
        let mut layout = layout(&[(0, &[3], DType::F32)]);
        layout.push(ParamSpec::new(ParamId(1), &[3], DType::F32), DType::F32, |_| false).unwrap();
        assert_eq!(layout.slot(1), Slot { buffer: 1, offset: 0, len: 3 });
    }

    #[test]
    fn offsets_beyond_32_bits_and_sizes_beyond_the_address_space() {
        let mut layout = layout(&[(0, &[1 << 20, 1 << 13], DType::F32), (1, &[2], DType::F32)]);
        assert_eq!(layout.slot(1).offset, 1 << 33);
        let before = layout.clone();
        for shape in [[1 << 40, 1 << 40], [1 << 31, 1 << 30]] {
            let refused = layout.push(ParamSpec::new(ParamId(2), &shape, DType::F32), DType::F32, |_| true);
            assert!(matches!(refused, Err(Error::Tensor { parameter, .. }) if parameter == "2"));
        }
        assert_eq!(layout, before);
    }

    #[test]
    fn an_id_is_registered_once() {
        let mut layout = layout(&[(5, &[3], DType::F32)]);
        let refused = layout.push(ParamSpec::new(ParamId(5), &[4], DType::F32), DType::F32, |_| true);
        assert_eq!(refused, Err(Error::DuplicateParameter { parameter: "5".into() }));
    }
}
