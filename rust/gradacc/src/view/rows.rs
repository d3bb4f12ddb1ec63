//! Some rows of a tensor that is zero elsewhere.

use super::TensorView;
use crate::error::TensorError;
use crate::param::element_count;

/// Rows and where they belong. Invariants: `values` has `numbers.len()` rows of `len` components, and every number is
/// below that of the tensor's rows.
#[derive(Clone, Debug)]
pub(crate) struct Rows<'a> {
    pub(crate) numbers: Vec<usize>,
    /// Components of one row.
    pub(crate) len: usize,
    /// Dense, one row after the other.
    pub(crate) values: TensorView<'a>,
}

impl<'a> Rows<'a> {
    pub(super) fn new(numbers: Vec<usize>, values: TensorView<'a>, shape: &[usize]) -> Result<Self, TensorError> {
        let malformed = |reason: String| Err(TensorError::Malformed(reason));
        let (count, row_shape) = match values.shape() {
            [count, row_shape @ ..] => (*count, row_shape),
            [] => return malformed("expected values with one row or more, got a single number".into()),
        };
        if values.rows().is_some() || count != numbers.len() || !shape.ends_with(row_shape) {
            return malformed(format!(
                "expected a row of a tensor of shape {shape:?} for each of {} numbers, got values of shape {:?}",
                numbers.len(),
                values.shape()
            ));
        }
        let Some(rows) = element_count(&shape[..shape.len() - row_shape.len()]) else {
            return malformed(format!("a tensor of shape {shape:?} exceeds the address space"));
        };
        if let Some(outside) = numbers.iter().find(|&&number| number >= rows) {
            return malformed(format!("expected row numbers below {rows}, got {outside}"));
        }
        let len = row_shape.iter().product::<usize>() * values.dtype().components();
        Ok(Self { numbers, len, values })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_must_fit() {
        let view = |shape: &[usize]| TensorView::from_slice(&[1.0_f32; 6], shape).unwrap();
        assert_eq!(Rows::new(vec![4, 0], view(&[2, 3]), &[5, 3]).unwrap().len, 3);
        assert_eq!(Rows::new(vec![0; 6], view(&[6]), &[5, 3]).unwrap().len, 1);
        assert!(Rows::new(vec![14; 6], view(&[6]), &[5, 3]).is_ok());
        assert!(Rows::new(vec![0, 0], view(&[2, 3]), &[3]).is_ok());
        for (numbers, values, shape) in [
            (vec![5, 0], view(&[2, 3]), &[5, 3][..]),
            (vec![0], view(&[2, 3]), &[5, 3]),
            (vec![0, 0], view(&[2, 3]), &[5, 2]),
            (vec![15; 6], view(&[6]), &[5, 3]),
        ] {
            assert!(Rows::new(numbers, values, shape).is_err(), "{shape:?}");
        }
    }
}
