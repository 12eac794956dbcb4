//! A simulation in the machine's place, for one thread while it runs.

use std::cell::RefCell;
use std::fmt::Debug;
use std::rc::Rc;

use spotq_model::Timestamp;

/// What a simulation answers.
pub trait Machine: Debug {
    /// The wall clock of the machine that asks.
    fn now(&self) -> Timestamp;
    /// Bits that are drawn from the seed.
    fn random(&self) -> u128;
}

thread_local! {
    static MACHINE: RefCell<Option<Rc<dyn Machine>>> = const { RefCell::new(None) };
}

/// The simulation answers on this thread until it is dropped.
#[derive(Debug)]
#[must_use = "the machine itself answers again when this is dropped"]
pub struct Installed(());

/// Puts a simulation in the machine's place, on this thread alone.
pub fn install(machine: Rc<dyn Machine>) -> Installed {
    MACHINE.set(Some(machine));
    Installed(())
}

impl Drop for Installed {
    fn drop(&mut self) {
        MACHINE.set(None);
    }
}

/// Asks the simulation, if there is one on this thread.
pub(crate) fn with<T>(ask: impl FnOnce(&dyn Machine) -> T) -> Option<T> {
    let machine = MACHINE.with_borrow(Clone::clone);
    machine.as_deref().map(ask)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Fixed;

    impl Machine for Fixed {
        fn now(&self) -> Timestamp {
            Timestamp(7)
        }

        fn random(&self) -> u128 {
            42
        }
    }

    #[test]
    fn a_simulation_answers_while_it_is_there_and_on_its_own_thread_alone() {
        let installed = install(Rc::new(Fixed));
        assert_eq!((crate::now(), crate::uuid()), (Timestamp(7), crate::uuid()));
        let elsewhere = std::thread::spawn(|| (crate::now(), crate::uuid())).join().unwrap();
        assert!(elsewhere.0 > Timestamp(7) && elsewhere.1 != crate::uuid());
        drop(installed);
        assert!(crate::now() > Timestamp(7));
        assert_ne!(crate::uuid(), crate::uuid());
    }
}
