//! Torch's sparse COO tensors: rows of a table, as the gradient of an embedding with `sparse=True` has them.

use gradacc::{TensorError, TensorView};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Whether a torch tensor is one.
pub(crate) fn is_sparse(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    tensor.getattr(intern!(tensor.py(), "is_sparse"))?.is_truthy()
}

/// What is stored of one: a dense tensor whose first dimension counts the entries. They may repeat.
pub(crate) fn values<'py>(tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    tensor.call_method0(intern!(tensor.py(), "_values"))
}

/// The whole tensor, given a view of its values. Copies its indices, and nothing else.
pub(crate) fn view<'a>(
    tensor: &Bound<'_, PyAny>,
    values: TensorView<'a>,
) -> PyResult<Result<TensorView<'a>, TensorError>> {
    let py = tensor.py();
    let shape: Vec<usize> =
        tensor.getattr(intern!(py, "shape"))?.try_iter()?.map(|n| n?.extract()).collect::<PyResult<_>>()?;
    let indices = tensor.call_method0(intern!(py, "_indices"))?.call_method0(intern!(py, "numpy"))?;
    let bytes = indices.call_method0(intern!(py, "tobytes"))?;
    let count = values.shape().first().copied().unwrap_or(0);
    Ok(rows(&shape, count, bytes.cast::<PyBytes>()?.as_bytes())
        .and_then(|rows| TensorView::from_rows(rows, values, &shape)))
}

/// The row of each entry, counted over the first dimensions. `indices` are 64-bit integers: those of all entries in the
/// first dimension, then those in the second, and so on.
fn rows(shape: &[usize], count: usize, indices: &[u8]) -> Result<Vec<usize>, TensorError> {
    let mut rows = vec![0; count];
    let dimensions = indices.chunks_exact((count * size_of::<i64>()).max(1));
    for (axis, (&size, indices)) in shape.iter().zip(dimensions).enumerate() {
        for (row, index) in rows.iter_mut().zip(indices.as_chunks().0) {
            let index = i64::from_ne_bytes(*index);
            let within = usize::try_from(index).ok().filter(|&index| index < size);
            let within = within.ok_or_else(|| {
                TensorError::Malformed(format!("expected indices below {size} in dimension {axis}, got {index}"))
            })?;
            *row = *row * size + within;
        }
    }
    Ok(rows)
}
