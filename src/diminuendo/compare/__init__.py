"""Methods of private training at equal budgets: one table, its pictures and a page."""
