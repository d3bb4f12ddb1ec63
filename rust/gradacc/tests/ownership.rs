//! Who owns what `take` hands over, how long it lives, and what it costs.

use gradacc::dlpack::{Imported, export_legacy, export_versioned};
use gradacc::{DType, Gradient, GradientAccumulator, Gradients, ParamId, Store, TensorView, Weight};

const W: ParamId = ParamId(0);
const V: ParamId = ParamId(1);
const LEN: usize = 1000;

fn accumulator() -> GradientAccumulator {
    GradientAccumulator::builder().param(W, &[LEN], DType::F32).param(V, &[3], DType::F32).build().unwrap()
}

fn add(accumulator: &mut GradientAccumulator, value: f32, weight: f64) {
    let gradient = vec![value; LEN];
    let view = TensorView::from_slice(&gradient, &[LEN]).unwrap();
    accumulator.add(&[(W, view)][..], Weight::new(weight).unwrap()).unwrap();
}

fn window(accumulator: &mut GradientAccumulator, value: f32) -> Gradients {
    add(accumulator, value, 1.0);
    accumulator.take().unwrap()
}

fn get(gradients: &Gradients) -> Gradient {
    gradients.get(W).unwrap().unwrap()
}

#[track_caller]
fn assert_all(gradient: &Gradient, value: f32) {
    assert!(gradient.as_slice::<f32>().unwrap().iter().all(|&x| x == value));
}

#[test]
fn a_steady_state_maps_nothing() {
    let mut accumulator = accumulator();
    for i in 0..50 {
        assert_all(&get(&window(&mut accumulator, i as f32)), i as f32);
    }
    assert_eq!(accumulator.store().mapped_buffers(), 1);
    let mut held = window(&mut accumulator, 0.0);
    for i in 0..50 {
        held = window(&mut accumulator, i as f32);
    }
    assert_all(&get(&held), 49.0);
    assert_eq!(accumulator.store().mapped_buffers(), 2);
}

#[test]
fn what_was_handed_over_never_changes() {
    let mut accumulator = accumulator();
    let held: Vec<_> = (0..5).map(|i| window(&mut accumulator, i as f32)).collect();
    let exported: Vec<_> = held.iter().map(get).collect();
    add(&mut accumulator, 99.0, 1.0);
    drop(held);
    drop(accumulator);
    for (i, gradient) in exported.iter().enumerate() {
        assert_all(gradient, i as f32);
    }
}

#[test]
fn scaling_after_a_hand_over_goes_into_new_memory() {
    let mut accumulator = accumulator();
    add(&mut accumulator, 6.0, 3.0);
    let mut gradients = accumulator.take().unwrap();
    let first = get(&gradients);
    gradients.scale(0.5).unwrap();
    let second = get(&gradients);
    assert_eq!(gradients.clip(1.0).unwrap(), 3.0 * (LEN as f64).sqrt());
    assert_all(&first, 6.0);
    assert_all(&second, 3.0);
    assert_ne!(first.as_ptr(), second.as_ptr());
    assert!((gradients.norm().unwrap() - 1.0).abs() < 1e-5);
}

#[test]
fn clipping_changes_no_bit_below_the_limit() {
    let mut gradients = window(&mut accumulator(), 0.1);
    let norm = gradients.norm().unwrap();
    assert_eq!(gradients.clip(norm * 1.1).unwrap(), norm);
    assert_all(&get(&gradients), 0.1);
    for wrong in [-1.0, f64::NAN] {
        assert!(gradients.clip(wrong).is_err());
    }
    assert!(gradients.scale(f64::INFINITY).is_err());
}

#[test]
fn flat_buffers_are_zero_where_the_window_saw_nothing() {
    let mut accumulator = accumulator();
    let both = [(W, vec![7.0_f32; LEN]), (V, vec![f32::NAN; 3])];
    let views = both.iter().map(|(id, values)| (*id, TensorView::from_slice(values, &[values.len()]).unwrap()));
    accumulator.add(&views.collect::<Vec<_>>(), Weight::ONE).unwrap();
    drop(accumulator.take().unwrap());
    let gradients = window(&mut accumulator, 1.0);
    let flat = gradients.flat().unwrap();
    let elements = flat[0].as_slice::<f32>().unwrap();
    assert!(elements[..LEN].iter().all(|&x| x == 1.0) && elements[LEN..].iter().all(|&x| x == 0.0));
    assert_eq!(flat[0].as_ptr(), get(&gradients).as_ptr());
    assert_eq!(accumulator.store().mapped_buffers(), 1);
}

#[test]
fn padding_that_was_handed_over_is_zero_again_in_the_next_window() {
    let mut accumulator = accumulator();
    let gradients = window(&mut accumulator, 1.0);
    let flat = gradients.flat().unwrap();
    let len = flat[0].shape()[0];
    // SAFETY: the buffer has `len` elements, is writable, and nobody else looks at it.
    unsafe { flat[0].as_ptr().cast_mut().cast::<f32>().add(LEN).write(f32::NAN) };
    assert!(len > LEN);
    drop((flat, gradients));
    let gradients = window(&mut accumulator, 2.0);
    let flat = gradients.flat().unwrap();
    assert!(flat[0].as_slice::<f32>().unwrap()[LEN..].iter().all(|&x| x == 0.0));
    assert_eq!(accumulator.store().mapped_buffers(), 1);
}

#[test]
fn an_export_through_dlpack_aliases_and_is_released_on_any_thread() {
    let mut accumulator = accumulator();
    let gradient = get(&window(&mut accumulator, 4.0));
    let address = gradient.as_ptr().addr();
    // SAFETY: both were just exported, and are consumed here alone.
    let exports = unsafe {
        [Imported::from_versioned(export_versioned(gradient.clone())), Imported::from_legacy(export_legacy(gradient))]
    };
    for export in exports {
        // SAFETY: just exported, and consumed by this value alone.
        let view = unsafe { export.view() }.unwrap();
        assert_eq!((view.shape(), view.dtype()), (&[LEN][..], DType::F32));
        let mut other = self::accumulator();
        other.add(&[(W, view)][..], Weight::ONE).unwrap();
        assert_all(&get(&other.take().unwrap()), 4.0);
        struct Sent(Imported);
        // SAFETY: a managed tensor is sent to another thread as a whole; its deleter may run anywhere.
        unsafe impl Send for Sent {}
        let export = Sent(export);
        std::thread::spawn(move || drop({ export }.0)).join().unwrap();
    }
    // The memory has come back, and is lent again.
    add(&mut accumulator, 1.0, 1.0);
    assert_eq!(get(&accumulator.take().unwrap()).as_ptr().addr(), address);
}

#[test]
fn a_copy_is_memory_of_its_own() {
    let mut accumulator = accumulator();
    let gradients = window(&mut accumulator, 4.0);
    let copy = get(&gradients).to_owned_copy().unwrap();
    assert_ne!(copy.as_ptr(), get(&gradients).as_ptr());
    drop((gradients, accumulator));
    assert_all(&copy, 4.0);
    assert!(copy.as_slice::<f64>().is_err());
}

#[test]
fn reset_forgets_and_keeps_the_memory() {
    let mut accumulator = accumulator();
    add(&mut accumulator, f32::NAN, 5.0);
    accumulator.reset();
    assert_eq!((accumulator.count(), accumulator.weight(), accumulator.window()), (0, 0.0, 0));
    assert_all(&get(&window(&mut accumulator, 2.0)), 2.0);
    assert_eq!((accumulator.store().mapped_buffers(), accumulator.window()), (1, 1));
    assert_eq!(accumulator.store().layout().len(), 2);
}
