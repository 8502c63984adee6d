<?php // Products of a shop, in the database that WordPress' variables name.
[$host, $user, $password, $name] = array_map(fn($key) => getenv("WORDPRESS_DB_$key"), ['HOST', 'USER', 'PASSWORD', 'NAME']);
$database = new mysqli($host, $user, $password, $name);
$database->query('CREATE TABLE IF NOT EXISTS products (name VARCHAR(100)) COLLATE utf8mb4_unicode_520_ci');
if ($_SERVER['REQUEST_METHOD'] == 'POST') {
    file_put_contents(__DIR__ . '/uploaded', file_get_contents('php://input'));
    $insert = $database->prepare('INSERT INTO products VALUES (?)');
    $insert->execute([file_get_contents('php://input')]);
}
$uploaded = file_exists(__DIR__ . '/uploaded') ? file_get_contents(__DIR__ . '/uploaded') : null;
$products = array_column($database->query('SELECT name FROM products')->fetch_all(), 0);
echo json_encode(['host' => $_SERVER['HTTP_HOST'], 'uploaded' => $uploaded, 'products' => $products]);
