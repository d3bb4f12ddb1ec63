//! How the components of a strided tensor are walked in logical order.

use smallvec::SmallVec;

/// A tensor as a stack of matrices, each of `rows` x `columns` in logical order, that lie in memory the other way round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Tiling {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

/// Some rows of a stack of matrices, counted from its first, and some of their columns.
pub(crate) struct Tile {
    pub(crate) row: usize,
    pub(crate) rows: usize,
    pub(crate) column: usize,
    pub(crate) columns: usize,
}

/// The dimensions of a tensor from the outermost to the innermost, as (size, stride in elements), after those of size
/// 1 are dropped and those that are one run in memory are merged.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Walk(SmallVec<[(usize, isize); 4]>);

impl Walk {
    /// None if the walk is one contiguous run. There is no dimension of size 0.
    pub(super) fn new(shape: &[usize], strides: &[isize]) -> Option<Self> {
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
    pub(super) unsafe fn gather<S: Copy>(&self, data: *const S, start: usize, out: *mut [S]) {
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

    /// The two innermost dimensions, if neighbours in memory are neighbours in a column rather than in a row, as they are
    /// in a transposed matrix and in channels-last order.
    pub(super) fn tiling(&self) -> Option<Tiling> {
        match self.0[..] {
            [.., (rows, row_stride), (columns, stride)] if row_stride.unsigned_abs() < stride.unsigned_abs() => {
                Some(Tiling { rows, columns })
            }
            _ => None,
        }
    }

    /// How many components lie before the first one, and how many from the first to the last.
    pub(super) fn reach(&self) -> (usize, usize) {
        let extent = |&(size, stride): &(usize, isize)| (size - 1) as isize * stride;
        let (negative, positive): (Vec<isize>, Vec<isize>) = self.0.iter().map(extent).partition(|&extent| extent < 0);
        let sum = |extents: Vec<isize>| extents.into_iter().map(isize::unsigned_abs).sum::<usize>();
        (sum(negative), sum(positive) + 1)
    }

    /// # Safety
    /// As for [`TensorView::gather_tile`](super::TensorView::gather_tile), `data` being the tensor this walk was made for.
    pub(super) unsafe fn gather_tile<S: Copy>(&self, data: *const S, tile: &Tile, out: *mut S, out_stride: usize) {
        let [outer @ .., (rows, row_stride), (_, stride)] = &self.0[..] else {
            panic!("a walk with tiles has two dimensions")
        };
        let (mut matrix, row) = (tile.row / rows, tile.row % rows);
        let mut start = row as isize * row_stride + tile.column as isize * stride;
        for &(size, stride) in outer.iter().rev() {
            start += (matrix % size) as isize * stride;
            matrix /= size;
        }
        for column in 0..tile.columns {
            let column_start = start + column as isize * stride;
            for row in 0..tile.rows {
                // SAFETY: (matrix, row, column) is an index within the shape, so its element is readable by the contract of
                // `from_raw_parts`; the target is writable by this function's.
                unsafe {
                    let element = data.offset(column_start + row as isize * row_stride).read_unaligned();
                    out.add(row * out_stride + column).write(element);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn matrices_that_lie_the_other_way_round_are_recognised() {
        let tiling = |shape, strides| Walk::new(shape, strides).and_then(|walk| walk.tiling());
        let channels_last = (&[2, 5, 3, 4][..], &[60, 1, 20, 5][..]);
        assert_eq!(tiling(channels_last.0, channels_last.1), Some(Tiling { rows: 5, columns: 12 }));
        assert_eq!(tiling(&[7, 9], &[1, 7]), Some(Tiling { rows: 7, columns: 9 }));
        assert_eq!(tiling(&[7, 9], &[18, 2]), None);
        assert_eq!(tiling(&[7], &[-1]), None);
    }

    #[test]
    fn reach_is_that_of_the_outermost_elements() {
        let reach = |shape, strides| Walk::new(shape, strides).unwrap().reach();
        assert_eq!(reach(&[4, 3], &[1, 4]), (0, 12));
        assert_eq!(reach(&[5], &[-2]), (8, 1));
        assert_eq!(reach(&[3, 4], &[-10, 2]), (20, 7));
        assert_eq!(reach(&[3, 4], &[0, 0]), (0, 1));
    }
}
